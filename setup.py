"""What megaprec is to pip; the settings of the tools that check it are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

PACKAGES = ("megaprec", "parallel", "models", "tools")
CHECKS = ["pytest>=8", "pytest-xdist>=3.6", "execnet>=2.1", "hypothesis>=6.100", "ruff>=0.9", "pyright>=1.1.390"]
CHECKS += ["spmd_types>=0.3"]
DATA = ["pyarrow>=17"]
HF = ["tokenizers>=0.20", "transformers>=5"]
PLOTS = ["matplotlib>=3.8"]
ORACLES = ["megatron-core>=0.16", "einops>=0.8", "psutil>=6"]  # other people's code that slow tests compare with
ORACLES += ["lm-eval[hf]>=0.4.9"]
TENSORBOARD = ["tensorboard>=2.15"]
WANDB = ["wandb>=0.31"]
YAML = ["pyyaml>=6"]
README = Path(__file__).with_name("README.md")

setup(
    name="megaprec",
    version="0.1.0",
    description="Tensor-, pipeline- and data-parallel pretraining in mixed precision that can be trusted",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=[name for package in PACKAGES for name in (package, f"{package}.*")]),
    package_dir={"": "."},  # makes an editable install a plain path file, which type checkers follow
    package_data={"": ["py.typed", "*.c"]},
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "sentencepiece>=0.2",
        "safetensors>=0.4",
        "pydantic>=2.10",
        "rich>=13",
    ],
    extras_require={
        "data": DATA,
        "hf": HF,
        "oracles": ORACLES,
        "plots": PLOTS,
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        "yaml": YAML,
        "test": [*CHECKS, *DATA, *HF, *PLOTS, *TENSORBOARD, *WANDB, *YAML],
    },
    entry_points={"console_scripts": ["megaprec = tools.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
