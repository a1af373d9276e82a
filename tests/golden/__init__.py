"""A learning curve that others have published, followed to four digits in eight ways of running.

The curve is that of nanoGPT's CPU run on Shakespeare's characters (`published.json`). Initial
weights and batches are drawn as that program draws them (`stream`), so that not the statistics of a
run are compared but its every loss.

    python -m tests.golden --text input.txt --page docs/reproduced.md --plot docs/reproduced.png
"""
