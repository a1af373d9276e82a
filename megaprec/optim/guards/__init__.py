"""Checks that ranks train one model: when an optimizer is built, and as a loop goes on."""
