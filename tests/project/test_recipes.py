"""Every recipe says where it comes from, fits its GPUs, and trains when its model is made small."""

import random
import shlex
from pathlib import Path

import pytest

from tests.project.recipes_page import page, planned
from tests.refusals import shows
from tests.runs import WORDS, losses, train_on
from tools.cli import main
from tools.config.run_file import load_run
from tools.recipes.recipe import NOTES, Recipe, read_recipe, recipe_names

ROOT = Path(__file__).parents[2]
ALWAYS = {"follows", "differs", "text", "reaches"}
# of all recipes: a small text and tokenizer, and few short steps
SMALL_RUN = """
    data.tokenizer='' data.vocab_size=330 data.held_out=0.1 data.validation=[]
    lr.warmup=1 lr.length=0 train.steps=3 train.global_batch=4 train.micro_batch=1 train.seq_length=16
    train.eval_every=2 train.eval_samples=2 train.init_from='' train.threads=1
    checkpoint.every=0 log.sample='' log.plot=false
    parallel.context=1
"""
SMALL_MODEL = "model.vocab=0 model.hidden=32 model.heads=4 model.ffn=32 model.layers=2"
# what their presets have besides
SMALL_PARTS = {
    "deepseek-v2-lite": """model.latent='{kv_rank=16, rope_dim=4, nope_dim=8, value_dim=8}' model.experts=4
        model.experts_per_token=2 model.dense_layers=[0] model.dense_ffn=32 model.shared_experts=32 lr.decay=1""",
    "gpt-oss-20b-continued": """model.kv_heads=2 model.head_dim=8 model.experts=4 model.experts_per_token=2
        model.window=8 model.window_layers=[0]""",
    "llama-3-8b-64k": "model.kv_heads=2",
    "llama-3.2-1b": "model.kv_heads=2",
    "mixtral-8x7b": "model.kv_heads=2 model.experts=4",
    "mup-proxy": "model.mup_base_hidden=32",
    "mup-target": "model.mup_base_hidden=16",
    "qwen3-0.6b": "model.kv_heads=2 model.head_dim=8",
    "qwen3-8b": "model.kv_heads=2 model.head_dim=8",
    "qwen3-next-small": """model.layers=4 model.kv_heads=2 model.head_dim=8 model.experts=4
        model.delta_net='{key_heads=2, value_heads=2, key_dim=8, value_dim=8}' model.experts_per_token=2
        model.shared_experts=32""",
}
RECIPES = [read_recipe(name) for name in recipe_names()]
FOR_GPUS = [recipe for recipe in RECIPES if "plan" in recipe.notes]


def name_of(recipe: Recipe) -> str:
    return recipe.name


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_says_where_it_comes_from_and_what_it_needs(recipe: Recipe) -> None:
    assert set(NOTES) >= set(recipe.notes) >= ALWAYS
    assert ("plan" in recipe.notes) != ("takes" in recipe.notes)
    assert recipe.title and all(recipe.notes.values())
    assert not any("{" in note for note in recipe.notes.values()), "a number was not filled in"


@pytest.mark.parametrize("recipe", FOR_GPUS, ids=name_of)
def test_a_recipe_fits_the_gpus_that_it_is_meant_for(recipe: Recipe) -> None:
    assert planned(recipe.name).verdict == "fits"


def test_the_page_of_recipes_is_made_from_the_files() -> None:
    assert (ROOT / "docs/recipes.md").read_text() == page()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small text of its own folder."""
    folder = tmp_path / "text"
    folder.mkdir()
    dice = random.Random(0)
    lines = [" ".join(dice.choices(WORDS, k=9)) for _ in range(400)]
    (folder / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_trains_when_its_model_is_small(
    recipe: Recipe, text: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(recipe.content)
    loaded = load_run(file, ["train.init_from=''"])
    words = shlex.split(f"{SMALL_RUN} {SMALL_MODEL} {SMALL_PARTS.get(recipe.name, '')}")
    if loaded.data.blend:
        words.append(
            f"data.blend=[{{source='{text}', weight=0.5}}, {{source='{text}/a.txt', weight=0.5}}]"
        )
    else:
        words.append(f"data.source={text}")
    experts = min(2, loaded.parallel.expert)
    words += [f"parallel.expert={experts}", f"train.folder={tmp_path}/run"]
    pipeline = min(2, loaded.parallel.pipeline)
    data = min(2, loaded.parallel.data)
    folder = train_on(file, *words, pipeline=pipeline, data=data)
    assert len(losses(folder)) == 3


def test_init_writes_a_recipe_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    assert main(["init", "--recipe", "gpt2-124m", "-o", str(file)]) == 0
    recipe = read_recipe("gpt2-124m")
    assert file.read_text() == recipe.content
    said = capsys.readouterr().out
    assert recipe.title in said
    assert f"next: megaprec plan {file} {recipe.notes['plan']}" in said


def test_a_text_takes_the_place_of_the_recipes(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert main(["init", "--recipe", "python-coder", 'my "text"\\', "-o", str(file)]) == 0
    assert load_run(file).data.source == 'my "text"\\'


@pytest.mark.parametrize(("source", "missing"), [("here.txt", False), ("not_here.txt", True)])
def test_another_text_that_is_not_there_is_told(
    source: str,
    missing: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("some text")
    assert main(["init", "--recipe", "shakespeare", source]) == 0
    said = capsys.readouterr().out
    assert ("no such file or folder" in said) == missing


def test_what_a_recipe_reaches_is_not_said_of_another_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = read_recipe("shakespeare")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("some text")
    assert main(["init", "--recipe", "shakespeare", "my.txt", "-o", str(tmp_path / "x.toml")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"text my.txt, in place of the recipe's: {recipe.notes['text']}" in printed
    assert f"reaches with the recipe's own text: {recipe.notes['reaches']}" in printed


@pytest.mark.parametrize(
    "name", [recipe.name for recipe in RECIPES if "\nsource = " in recipe.content]
)
def test_comments_beside_another_text_say_what_is_of_the_recipes_own(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    assert main(["init", "--recipe", name, "my\n\x07text", "-o", str(file)]) == 0
    assert load_run(file).data.source == "my\n\x07text"
    written = file.read_text().splitlines()
    for line in read_recipe(name).content.splitlines():
        if line.startswith("# text: "):
            own = line.removeprefix("# text: ")
            assert f'# text: "my\\n\\u0007text", in place of the recipe\'s: {own}' in written
        elif line.startswith("# reaches: "):
            own = line.removeprefix("# reaches: ")
            assert f"# reaches: with the recipe's own text: {own}" in written
        elif line.startswith("#"):
            assert line in written


def test_another_text_of_characters_decides_the_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    assert main(["init", "--recipe", "shakespeare", "my.txt", "-o", str(file)]) == 0
    assert load_run(file).model.vocab == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["bilingual", "my_text"], "command.recipe_blend"),
        (["gpt2-124m", "--preset", "gpt2"], "command.recipe_alone"),
        (["gpt2-124m", "--characters"], "command.recipe_alone"),
        (["gpt2-124m", "my_text", "--text-field", "body"], "command.recipe_alone"),
    ],
)
def test_a_recipe_with_what_contradicts_it_is_refused(
    words: list[str], code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    assert main(["init", "--recipe", *words, "-o", str(file)]) == 2
    assert shows(capsys.readouterr().err, code, recipe=words[0])
    assert not file.exists()
