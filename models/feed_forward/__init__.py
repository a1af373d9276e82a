"""The feed-forward of a layer, dense or with experts: router, dispatch, grouped products."""
