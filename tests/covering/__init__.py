"""Every triple of options, once, beside an outside oracle.

A fault of one combination of three options is not found by drawing runs: a covering array has each
triple of values in some run. Each run is trained in its layout and by transformers and torch
(`megaprec parity --oracle transformers`), in float64.

    python -m tests.covering --minutes 170 --kept runs/covering.jsonl
"""
