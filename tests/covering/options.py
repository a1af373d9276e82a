"""The options that are combined, and the words of a command that each of their values is.

The first value of an option is the one that the others leave alone.
"""

from parallel.pipeline.kinds import KINDS
from tests.covering.around import ONE, OWN
from tests.families import CASES, config_of
from tests.parity.oracle_runs import words_of
from tools.console.toml import toml

Row = dict[str, str]  # of each option the name of its value

# a model of each family, as odd as it can be
FAMILIES = (
    "llama",
    "gpt2",
    "gpt_neox",
    "mistral",
    "qwen2",
    "qwen3",
    "olmo2 kv1 biased",
    "olmo3 yarn",
    "gemma2",
    "gemma3",
    "gemma4",
    "deepseek_v2",
    "deepseek_v3 yarn",
    "gpt_oss",
    "mixtral",
    "qwen3_moe with a dense layer",
    "qwen2_moe",
    "glm4_moe",
    "nemotron_h",
    "nemotron_h with experts in groups beside a feed-forward",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5 with experts",
    "iquestcoder",
    "internlm3",
    "seed_oss",
    "smollm3",
    "exaone4",
    "ernie4_5 tied, with biases",
    "phi3",
    "granite",
    "granitemoe",
    "arcee",
    "olmoe",
    "minimax_m2",
    "dots1",
    "solar_open",
    "glm4_moe_lite",
    "youtu",
    "kimi_linear",
    "cohere2",
    "nanochat",
    "apertus",
    "ministral3",
    "glm4",
)


OPTIONS: dict[str, dict[str, list[str]]] = {
    "family": {family: words_of(family) for family in FAMILIES},
    "tied": {
        "as the family": [],
        "yes": ["model.tied=true"],
        "no": ["model.tied=false"],
    },
    "tensor": {"1": [], "2": ["parallel.tensor=2"]},
    "pipeline": {"1": [], "2": ["parallel.pipeline=2"]},
    "data": {"1": [], "2": ["parallel.data=2"]},
    "context": {
        "1": [],
        "ring": ["parallel.context=2"],
        "gather": ["parallel.context=2", "parallel.context_by=gather"],
    },
    "experts": {
        "1": [],
        "2": ["parallel.expert=2"],
        "2, whole": ["parallel.expert=2", "parallel.expert_tensor=1"],
    },
    "sequence": {"no": [], "yes": ["parallel.sequence=true"]},
    "schedule": {
        "1f1b": [],
        "gpipe": ["parallel.schedule=gpipe"],
        "interleaved": ["parallel.schedule=interleaved"],
        "zb-h1": ["parallel.schedule=zb-h1"],
        "zb-h2": ["parallel.schedule=zb-h2"],
        "zb-v": ["parallel.schedule=zb-v"],
        "dualpipe-v": ["parallel.schedule=dualpipe-v"],
    },
    "zero": {
        "1": [],
        "0": ["parallel.zero=false"],
        "2": ["parallel.zero=2"],
        "3": ["parallel.zero=3"],
        "3, one layer kept": ["parallel.zero=3", "parallel.zero_keep=1"],
    },
    "zero_size": {"all": [], "1": ["parallel.zero_size=1"]},
    "overlap": {
        "auto": [],
        "yes": ["parallel.overlap=true", "parallel.bucket=500"],
        "no": ["parallel.overlap=false"],
    },
    "recompute": {
        "none": [],
        "selective": ["parallel.recompute=selective"],
        "norms": [
            "parallel.recompute=selective",
            'parallel.recompute_modules=["activation", "norm"]',
        ],
        "full": ["parallel.recompute=full"],
        "one layer": ["parallel.recompute=full", "parallel.recompute_layers=1"],
    },
    "batch": {
        "4 of 2": ["train.global_batch=8", "train.micro_batch=2"],
        "8 of 1": ["train.global_batch=8", "train.micro_batch=1"],
        "2 of 4": ["train.global_batch=8", "train.micro_batch=4"],
    },
    "batches": {
        "alike": [],
        "growing": ["train.batch_schedule=[[0, 4], [8, 12], [20, 8]]", "lr.unit=samples"],
    },
    "lengths": {
        "alike": [],
        "growing": ["train.seq_schedule=[[0, 4], [8, 8], [20, 16]]"],
    },
    "numerics": {"fastest": [], "canonical": ["train.numerics=canonical"]},
    "update": {
        "adamw": [],
        "sgd": ["optimizer.name=sgd"],
        "sgd, Nesterov": [
            "optimizer.name=sgd",
            "optimizer.options={momentum = 0.8, nesterov = true}",
        ],
        "lion": ["optimizer.name=lion", "optimizer.options={betas = [0.8, 0.95]}"],
    },
    "compile": {"off": [], "leaves": ["train.compile=leaves"]},
    "ema": {"none": [], "0.9": ["optimizer.ema=0.9"]},
    "groups": {
        "none": [],
        "by name": [
            'optimizer.groups=[{pattern = "embedding.*", lr = 0.5, weight_decay = 0.0}, '
            '{pattern = "*norm*", all_dims = true}]'
        ],
    },
    "clip": {
        "l2": [],
        "l3": ["optimizer.norm=3.0"],
        "largest": ["optimizer.norm=inf"],
        "none": ["optimizer.clip=0.0"],
    },
    "documents": {
        "one": [],
        "apart": ["data.reset_attention_mask=true", "data.reset_position_ids=true"],
        "apart, unpredicted": [
            "data.reset_attention_mask=true",
            "data.reset_position_ids=true",
            "data.eod_mask_loss=true",
        ],
        "apart, one count of positions": ["data.reset_attention_mask=true"],
        "restarted": ["data.reset_position_ids=true"],
        "best fit": ["data.pack=best_fit"],
        "best fit, apart, unpredicted": [
            "data.pack=best_fit",
            "data.reset_attention_mask=true",
            "data.reset_position_ids=true",
            "data.eod_mask_loss=true",
        ],
    },
    # of these `tests.covering.around` takes care
    "resume": {"none": [], OWN: [], ONE: []},
    "evaluation": {"none": [], "before each step": []},
    "schedule of rates": {
        "cosine": ["lr.schedule=cosine"],
        "linear": ["lr.schedule=linear", "lr.final=1e-5"],
        "wsd": ["lr.schedule=wsd", "lr.decay=2"],
    },
}
assert set(FAMILIES) <= set(CASES)
CHEAP_RANKS = 4  # of most rows
# what a combination may need, to be taken at all
NEEDED: tuple[Row, ...] = (
    {"data": "2"},
    {"tensor": "2"},
    {"family": "mixtral"},
    {"pipeline": "2", "batch": "8 of 1"},
    {"context": "gather"},
)
DEFAULT: Row = {option: next(iter(values)) for option, values in OPTIONS.items()}


def words_of_row(row: Row) -> list[str]:
    """The words of a command that a row is."""
    words: list[str] = []
    for option, value in row.items():
        words += OPTIONS[option][value]
    if _needs_more_layers(row):
        words += of_twice_the_layers(row["family"])
    return words


def _needs_more_layers(row: Row) -> bool:
    """Whether a row is about more layers of a stage, or about more stages, than the family has."""
    stages = int(row["pipeline"]) * KINDS[row["schedule"]].chunks
    of_one_layer = row["recompute"] == "one layer" or row["zero"] == "3, one layer kept"
    return config_of(CASES[row["family"]]).layers % stages > 0 or of_one_layer


def of_twice_the_layers(family: str) -> list[str]:
    """The words for as many more layers of the same kinds as a family has."""
    config = config_of(CASES[family])
    layers = config.layers

    def twice(numbers: tuple[int, ...]) -> list[int]:
        return [*numbers, *(number + layers for number in numbers)]

    more = {
        "layers": 2 * layers,
        "hybrid_pattern": 2 * config.hybrid_pattern,
        "window_layers": twice(config.window_layers),
        "nope_layers": twice(config.nope_layers),
        "delta_layers": twice(config.delta_layers),
    }
    return [f"model.{key}={toml(value)}" for key, value in more.items()]
