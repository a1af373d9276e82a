"""An engine is refused, before anything is built, if nobody has said the size of the vocabulary."""

from megaprec import plan
from models import Engine, EngineOptions, preset
from parallel.pipeline import schedule
from tests.refusals import raises


def test_a_vocabulary_that_nobody_knows_is_refused() -> None:
    config = preset("llama-demo", layers=1, hidden=8, heads=2, ffn=8)
    options = EngineOptions(micro_batch=1, seq_length=4)
    with raises("model.vocab_unknown"):
        Engine.build(config, plan("fp32"), None, schedule("1f1b", 1, 1), options)
