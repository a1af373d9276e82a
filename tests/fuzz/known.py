"""Inputs that once ended in a traceback, a signal or a long silence, and their kin: each is refused
in plain lines."""

FRESH = ["train", "my.toml", "train.folder=fresh"]
BUILD = ["data", "build", "text.txt"]
LONG = "x" * 300
DIGITS = "9" * 5000
DEEP = "[" * 2000

REFUSED: list[list[str]] = [
    *([*FRESH, f"train.global_batch={size}"] for size in (100_000, 10**9, 10**18)),
    *([*FRESH, f"model.layers={size}"] for size in (100_000, 10**18)),
    *(
        [*FRESH, f"parallel.{axis}={size}"]
        for axis in ("tensor", "pipeline", "data")
        for size in (4096, 100_000, 10**18)
    ),
    [*FRESH, "parallel.data=4096", "train.global_batch=8192"],
    [*FRESH, "model.experts=100000"],
    [*FRESH, "model.layers=100", "model.experts=8000"],
    [*FRESH, "model.head_dim=100000000"],
    [*FRESH, "model.vocab=2000000000"],
    [*FRESH, "model.heads=1000000000000", "model.hidden=1000000000000"],
    [*FRESH, "train.seq_length=2000000000"],
    [*FRESH, "train.micro_batch=1000000000", "train.global_batch=1000000000"],
    [*FRESH, "train.threads=100000"],
    [*FRESH, "data.workers=100000"],
    [*FRESH, f"train.seed={DIGITS}"],
    [*FRESH, f"train.seed={'9' * 400}"],
    [*FRESH, f"train.steps={DEEP}"],
    [*FRESH, f"optimizer.options={DEEP}{']' * 2000}"],
    *(
        [*FRESH, f"{key}={value}"]
        for key in (
            "train.folder",
            "data.cache",
            "data.source",
            "train.init_from",
            "train.branch_from",
            "data.tokenizer",
        )
        for value in (LONG, '"a\\u0000b"', "a\0b", "\udcff", "x/" * 3000)
    ),
    *(
        [*FRESH, f"parallel.schedule_file={value}"]
        for value in (LONG, '"a\\u0000b"', "fifo", "/dev/zero")
    ),
    *([*FRESH, f"data.source={value}"] for value in ("fifo", "/dev/zero")),
    [*FRESH, "log.sample=\udcff"],
    *(
        ["train", file]
        for file in ("fifo", "/dev/zero", "run", LONG, "nested.toml", "digits.toml", "nul.toml")
    ),
    *(["schedule", f"--transfer={value}"] for value in ("nan", "inf", "-1", "1e308")),
    *(["schedule", f"--costs={value}"] for value in ("nan,1,1", "inf,1,1", "1e308,1e308,1")),
    ["schedule", "--pipeline=100000"],
    ["schedule", "--microbatches=100000"],
    ["schedule", "--kind=interleaved", "--chunks=100000"],
    ["schedule", "--own", "fifo"],
    *(
        [*BUILD, prefix, "--tokenizer", "data/text.model"]
        for prefix in ("", ".", "..", "/", "a/..", "my.toml/x", LONG, "/proc/x")
    ),
    *(
        [*BUILD, "new", f"--vocab-size={size}"]
        for size in ("0", "-1", "9" * 30, "9" * 400, DIGITS, "4000000000")
    ),
    [*BUILD, "new", "--tokenizer", "data/text.model", "--workers=100000"],
    ["data", "build", "fifo", "new", "--vocab-size=330"],
    ["data", "build", "long.jsonl", "new", "--tokenizer", "data/text.model"],
    ["data", "inspect", "data/text", "--samples=-1"],
    ["diff", "run", "hf", "--top=-1"],
    ["generate", "run", "--prompt=x", f"--seed={'9' * 30}"],
    ["generate", "run", "--prompts", "fifo"],
    ["generate", "run", "--prompt=x", "--top-p=nan", "--min-p=inf", f"--top-k={'9' * 30}"],
    *(
        ["evaluate", "run", f"--data={path}"]
        for path in (LONG, "fifo", "x/" * 3000, f"a={LONG}", "=")
    ),
    ["evaluate", "run", "--data=text.txt", f"--window={'9' * 30}", f"--max-chars={'9' * 30}"],
    *(["inspect", path] for path in (LONG, "fifo", "x/" * 3000)),
    *(["precision", "show", path] for path in ("fifo", "/dev/zero", LONG, "nested.toml")),
    *(["import-args", path] for path in ("fifo", "/dev/zero", LONG, "nested.toml")),
    *(["compare", "run", "-o", path] for path in (f"{LONG}.png", "nowhere/x.png")),
]
