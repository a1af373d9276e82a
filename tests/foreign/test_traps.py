"""What Python does between an assignment and its use is followed, or the value is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megaprec.errors import UserError
from tests.refusals import raises
from tools.commands.precision import read_precision

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
USE = "\nFSDP(model, mixed_precision=MixedPrecision(param_dtype=dtype))\n"
OPEN = None
"""The file leaves the value open: it is refused."""
TRAPS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "a field of a recipe under a condition": (
        (
            "recipe = llm.llama3_8b.pretrain_recipe()\nif args.fp8:\n    "
            "recipe.trainer.plugins.fp8 = 'hybrid'"
        ),
        OPEN,
    ),
    "an early return": (
        "def tune(recipe):\n    if not args.fp8:\n        return recipe\n    "
        "recipe.trainer.plugins.fp8 = 'hybrid'\n"
        "    return recipe\nr = tune(llm.llama3_8b.pretrain_recipe())",
        OPEN,
    ),
    "an error before": (
        "if not args.ok:\n    raise ValueError\ndtype = torch.bfloat16" + USE,
        {"compute": BF16},
    ),
    "pop under a condition": (
        (
            "kw = dict(param_dtype=torch.bfloat16)\nif args.m:\n    "
            "kw.pop('param_dtype')\nMixedPrecision(**kw)"
        ),
        OPEN,
    ),
    "global": (
        "dtype = torch.bfloat16\ndef setup():\n    global dtype\n    dtype = torch.float16\nsetup()"
        + USE,
        OPEN,
    ),
    "nonlocal": (
        "def f():\n    dtype = torch.bfloat16\n    def g():\n        nonlocal dtype\n        "
        "dtype = torch.float16\n"
        "    g()\n    return MixedPrecision(dtype)\nf()",
        OPEN,
    ),
    "break": (
        "for d in [torch.bfloat16, torch.float16]:\n    dtype = d\n    break" + USE,
        OPEN,
    ),
    "continue": (
        "kw = {}\nfor k, v in {'param_dtype': torch.bfloat16, 'reduce_dtype': "
        "torch.float32}.items():\n"
        "    if k == 'reduce_dtype':\n        continue\n    kw[k] = v\nMixedPrecision(**kw)",
        OPEN,
    ),
    "else of a loop": (
        "for n in []:\n    pass\nelse:\n    dtype = torch.bfloat16" + USE,
        {"compute": BF16},
    ),
    "a deep copy": (
        "import copy\na = dict(b={'param_dtype': torch.bfloat16})\nc = copy.deepcopy(a)\n"
        "c['b']['param_dtype'] = torch.float16\nMixedPrecision(**a['b'])",
        OPEN,
    ),
    "a policy that is left aside": (
        "p = MixedPrecision(torch.bfloat16)\nmodel = FSDP(model, mixed_precision=None)",
        OPEN,
    ),
    "in a list that is not known": (
        "import sys\ndtype = torch.bfloat16 if 'bf16' in [sys.argv[1]] else torch.float16" + USE,
        OPEN,
    ),
    "a list that may be empty": (
        (
            "flags = []\nif args.half:\n    flags.append('half')\ndtype = torch.float16 if flags "
            "else torch.bfloat16"
        )
        + USE,
        OPEN,
    ),
    "a method of what pop returns": (
        "kw = dict(tp_size=2, pp_size=1, precision='BF16')\nprecision = kw.pop('precision', "
        "'FP16').lower()\n"
        "HybridParallelPlugin(precision=precision, **kw)",
        OPEN,
    ),
    "a key that is not known": (
        (
            "import sys\nkw = dict(param_dtype=torch.bfloat16)\nkw[sys.argv[1]] = "
            "torch.float16\nMixedPrecision(**kw)"
        ),
        OPEN,
    ),
    "an item of a list": (
        "d = [torch.bfloat16, torch.float32]\nd[0] = torch.float16\ndtype = d[0]" + USE,
        OPEN,
    ),
    "setattr in a loop over something unknown": (
        "p = MixedPrecision(torch.bfloat16)\nfor k, v in vars(args).items():\n    setattr(p, k, v)",
        OPEN,
    ),
    "the fields behind an object": (
        "p = MixedPrecision(torch.bfloat16)\np.__dict__.update(overrides)",
        OPEN,
    ),
    "fields of a dataclass by position": (
        (
            "@dataclass\nclass C:\n    dtype: torch.dtype = torch.bfloat16\ndtype = "
            "C(torch.float16).dtype"
        )
        + USE,
        OPEN,
    ),
    "__post_init__": (
        "@dataclass\nclass C:\n    dtype: torch.dtype = torch.bfloat16\n    def "
        "__post_init__(self):\n"
        "        self.dtype = torch.float16\ndtype = C().dtype" + USE,
        OPEN,
    ),
    "a static method": (
        "class P:\n    @staticmethod\n    def make(name, fp8=None):\n"
        "        return MegatronMixedPrecision('bf16-mixed', fp8=fp8)\nplugin = P.make('hybrid')",
        OPEN,
    ),
    "a default that was evaluated before": (
        (
            "dtype = torch.bfloat16\ndef f(d=dtype):\n    return MixedPrecision(d)\ndtype = "
            "torch.float16\nf()"
        ),
        OPEN,
    ),
    "setdefault of the environment": (
        "import os, neuronx_distributed\nos.environ['NEURON_RT_STOCHASTIC_ROUNDING_EN'] = '0'\n"
        "os.environ.setdefault('NEURON_RT_STOCHASTIC_ROUNDING_EN', '1')\n"
        "optimizer_config = {'zero_one_enabled': True}\n"
        "mixed_precision_config = {'use_master_weights': True}",
        {"rounding": "nearest"},
    ),
    "a field that a loop sets": (
        "p = bf16_mixed()\nwhile wanted():\n    p.fp8 = 'hybrid'",
        OPEN,
    ),
    "a plugin that a function of the file sets": (
        (
            "recipe = llm.llama3_8b.pretrain_recipe()\ndef tune(r):\n    r.trainer.plugins = "
            "other()\ntune(recipe)"
        ),
        OPEN,
    ),
    "a list of plugins that grows": (
        (
            "import nemo.lightning as nl\nplugins = [bf16_mixed()]\nplugins.append(other)\n"
            "nl.Trainer(plugins=plugins)"
        ),
        OPEN,
    ),
    "a field of what an object of their own holds": (
        "class R:\n    def f(self):\n        self.p = bf16_mixed()\n        self.p.fp8 = 'hybrid'",
        OPEN,
    ),
    "a method of an argument with the name of a recipe": (
        "class R:\n    def f(self):\n        self.bf16_mixed()",
        OPEN,
    ),
    "names of two functions": (
        (
            "def a():\n    dtype = torch.bfloat16\ndef b():\n    dtype = torch.float16\n    "
            "FSDP(m, mixed_precision=MixedPrecision(param_dtype=dtype))"
        ),
        OPEN,
    ),
    "a field of an alias": (
        "a = {}\nb = a\nb['param_dtype'] = torch.float16\nMixedPrecision(**a)",
        OPEN,
    ),
    "a function that is called on a condition by another": (
        "def build():\n    return bf16_mixed()\ndef main():\n    build()\nif a:\n    main()",
        OPEN,
    ),
    "a variable of the environment that a function sets on a condition": (
        "import os, neuronx_distributed\n"
        "def setup():\n    os.environ['NEURON_RT_STOCHASTIC_ROUNDING_EN'] = '1'\n"
        "if args.round:\n    setup()\n"
        "optimizer_config = {'zero_one_enabled': True}\n"
        "mixed_precision_config = {'use_master_weights': True}",
        OPEN,
    ),
    "a key of another name that is read, and set by a function": (
        "known = {'d': torch.bfloat16}\ndtype = known['d']\ndef later():\n"
        "    known['d'] = torch.float16" + USE,
        OPEN,
    ),
    "a list that is turned around": (
        "order = [torch.bfloat16, torch.float16]\norder.reverse()\ndtype = order[0]" + USE,
        OPEN,
    ),
    "a function that may end without a value": (
        (
            "import sys\ndef f():\n    if sys.argv[1] == 'a':\n        return "
            "torch.float16\ndtype = f()"
        )
        + USE,
        OPEN,
    ),
    "a decorator": (
        "def half(f):\n    return lambda **k: f(dtype=torch.float16)\n@half\ndef "
        "make(dtype=torch.bfloat16):\n"
        "    return dtype\ndtype = make()" + USE,
        OPEN,
    ),
    "a dict into which a file is loaded": (
        (
            "cfg = {'dtype': torch.bfloat16}\ncfg.update(json.load(open('my.json')))\ndtype = "
            "cfg['dtype']"
        )
        + USE,
        OPEN,
    ),
    "a key that is set after the file is loaded": (
        "cfg = {'dtype': "
        "torch.bfloat16}\ncfg.update(json.load(open('my.json')))\ncfg['dtype'] = "
        "torch.float16\n"
        "dtype = cfg.get('dtype')" + USE,
        OPEN,
    ),
    "a dict written before one that is not known": (
        "cfg = {'dtype': torch.bfloat16, **load()}\ndtype = cfg['dtype']" + USE,
        OPEN,
    ),
    "a dict written after one that is not known": (
        "cfg = {**load(), 'dtype': torch.bfloat16}\ndtype = cfg['dtype']" + USE,
        OPEN,
    ),
    "keywords beside those that are not known": (
        (
            "def make(dtype=torch.float16, **more):\n    return dtype\ndtype = "
            "make(dtype=torch.bfloat16, **load())"
        )
        + USE,
        OPEN,
    ),
    "keys that are not known in a loop": (
        (
            "cfg = {'dtype': torch.bfloat16}\nfor k, v in load().items():\n    cfg[k] = v\ndtype "
            "= cfg['dtype']"
        )
        + USE,
        OPEN,
    ),
    "settings by setattr in a loop": (
        "cfg = SimpleNamespace(dtype=torch.bfloat16)\nfor k, v in load().items():\n    "
        "setattr(cfg, k, v)\n"
        "dtype = cfg.dtype" + USE,
        OPEN,
    ),
    "settings of a class by setattr in a loop": (
        (
            "class C:\n    dtype = torch.bfloat16\nfor k, v in load().items():\n    setattr(C, "
            "k, v)\ndtype = C.dtype"
        )
        + USE,
        OPEN,
    ),
    "settings of an object by setattr in a loop": (
        "class C:\n    dtype = torch.bfloat16\nc = C()\nfor k, v in load().items():\n    "
        "setattr(c, k, v)\n"
        "dtype = c.dtype" + USE,
        OPEN,
    ),
    "a field through vars": (
        (
            "args = parse()\nargs.dtype = torch.bfloat16\nvars(args)['dtype'] = "
            "torch.float16\ndtype = args.dtype"
        )
        + USE,
        OPEN,
    ),
    "fields that are loaded behind an object": (
        (
            "args = parse()\nargs.dtype = torch.bfloat16\nargs.__dict__.update(load())\ndtype = "
            "args.dtype"
        )
        + USE,
        OPEN,
    ),
    "fields that are only looked at": (
        (
            "args = parse()\nargs.dtype = torch.bfloat16\nprint(vars(args), "
            "args.__dict__)\ndtype = args.dtype"
        )
        + USE,
        OPEN,
    ),
    "a dict that is emptied": (
        (
            "kw = dict(param_dtype=torch.float16)\nkw.clear()\nkw['param_dtype'] = "
            "torch.bfloat16\nMixedPrecision(**kw)"
        ),
        OPEN,
    ),
    "an item of a dict by its method": (
        (
            "kw = dict(param_dtype=torch.float16)\nkw.__setitem__('param_dtype', "
            "torch.bfloat16)\nMixedPrecision(**kw)"
        ),
        OPEN,
    ),
    "a dict's update by its class": (
        (
            "kw = dict(param_dtype=torch.float16)\ndict.update(kw, "
            "param_dtype=torch.bfloat16)\nMixedPrecision(**kw)"
        ),
        OPEN,
    ),
    "a dict that a package's method changes": (
        "cfg = EasyDict(dtype=torch.bfloat16)\ncfg.merge_from_list(opts)\ndtype = cfg.dtype" + USE,
        OPEN,
    ),
    "an update that is handed on": (
        (
            "cfg = dict(dtype=torch.bfloat16)\nlist(map(cfg.update, [{'dtype': "
            "torch.float16}]))\ndtype = cfg['dtype']"
        )
        + USE,
        OPEN,
    ),
    "an item that is deleted from a list": (
        "order = [torch.bfloat16, torch.float16]\ndel order[0]\ndtype = order[0]" + USE,
        OPEN,
    ),
    "an attribute that is deleted": (
        (
            "class C:\n    dtype = torch.float16\nc = C()\nc.dtype = torch.bfloat16\ndel "
            "c.dtype\ndtype = c.dtype"
        )
        + USE,
        OPEN,
    ),
    "a dict that holds itself": ("model = dict(dtype='torch.bfloat16')\nmodel['x'] = model", OPEN),
    "a dict under a condition": ("if args.half:\n    fp16 = dict(mode='TORCH')", OPEN),
    "a variable under a condition": (
        "fp16 = dict(mode='NAIVE')\nif args.clip:\n    clip_grad_norm = 0.5",
        OPEN,
    ),
    "a class with another name for a partial call of it": (
        (
            "from functools import partial\nfrom torch.distributed.fsdp import MixedPrecision\n"
            "MixedPrecision = partial(MixedPrecision, "
            "reduce_dtype=torch.float32)\nMixedPrecision(torch.bfloat16)"
        ),
        OPEN,
    ),
    "a key that is set by another name after its use": (
        (
            "a = {'param_dtype': torch.bfloat16}\nb = a\nMixedPrecision(**a)\n"
            "b['reduce_dtype'] = torch.float32"
        ),
        OPEN,
    ),
    "a key that is set through a dict that holds it, after its use": (
        (
            "a = {'param_dtype': torch.bfloat16}\nc = {'a': a}\nMixedPrecision(**a)\n"
            "c['a']['reduce_dtype'] = torch.float32"
        ),
        OPEN,
    ),
    "a dict that another name changes in place": (
        (
            "a = {'param_dtype': torch.bfloat16}\nb = a\nb |= {'param_dtype': torch.float16}\n"
            "MixedPrecision(**a)"
        ),
        OPEN,
    ),
    "a dict that a function of the file changes": (
        (
            "a = {'param_dtype': torch.bfloat16}\ndef patch(d):\n    d.update(load())\n"
            "patch(d=a)\nMixedPrecision(**a)"
        ),
        OPEN,
    ),
    "a dict that a lambda changes": (
        (
            "a = {'param_dtype': torch.bfloat16}\npatch = lambda d: d.update(load())\npatch(a)\n"
            "MixedPrecision(**a)"
        ),
        OPEN,
    ),
    "fields of what a loop goes over": (
        "p = MixedPrecision(torch.bfloat16)\nfor q in [p]:\n    q.reduce_dtype = torch.float32",
        OPEN,
    ),
    "a field of what is no object": (
        (
            "from megatron.bridge.recipes.llama import llama3_8b_pretrain_config\n"
            "cfg = llama3_8b_pretrain_config()\ncfg.mixed_precision = 'bf16_mixed'\n"
            "if args.fp8:\n    cfg.mixed_precision.fp8 = 'hybrid'"
        ),
        OPEN,
    ),
    "an item of a list of plugins": (
        "recipe = llm.llama3_8b.pretrain_recipe()\nrecipe.trainer.plugins[0].fp8 = 'hybrid'",
        OPEN,
    ),
    "a method of a plugin": (
        "recipe = llm.llama3_8b.pretrain_recipe()\nrecipe.trainer.plugins.update(fp8='hybrid')",
        OPEN,
    ),
    "a dict of a class, changed through it": (
        "class C:\n    fp16 = dict(mode='TORCH')\nC.fp16['mode'] = 'NAIVE'",
        OPEN,
    ),
    "a changed copy": (
        (
            "import dataclasses\np = MixedPrecision(torch.bfloat16)\n"
            "q = dataclasses.replace(p, reduce_dtype=torch.float32)\n"
            "FSDP(model, mixed_precision=q)"
        ),
        OPEN,
    ),
    "a dict of two names": (
        "fp16 = other = dict(mode='TORCH')\nother['mode'] = 'NAIVE'",
        {"compute": FP16, "parameters": FP16},
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_value_is_what_it_is_when_it_is_used_or_it_is_refused(name: str, tmp_path: Path) -> None:
    path, (text, expected) = tmp_path / "config.py", TRAPS[name]
    path.write_text(text)
    if expected is None:
        with pytest.raises(UserError):
            read_precision(path)
    else:
        plan = read_precision(path).plan
        assert {field: getattr(plan, field) for field in expected} == expected


def test_what_may_set_anything_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(f"dtype = torch.bfloat16\nexec(open('more.py').read()){USE}")
    assert any("line 2" in note for note in read_precision(path).notes)


def test_a_table_of_yaml_that_takes_in_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "base: &b {param_dtype: float16, reduce_dtype: float32}\nmp_policy:\n  param_dtype: "
        "bfloat16\n  <<: *b\n"
    )
    with raises("precision_file.yaml_merge", path=path, line=4):
        read_precision(path)
