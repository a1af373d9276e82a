"""A model trains packed samples as a plain model trains their documents, each by itself."""

import pytest
import torch
from torch import Tensor

from megaprec.tokens.indexed import IndexedDataset, IndexedWriter
from megaprec.tokens.packed_samples import split_packed
from megaprec.tokens.samples import Resets
from models.attention.packing import Packing
from models.engine.passes import Share
from tests.models.test_packing import CONFIGS, LENGTH, SAMPLES, oracle, run_all, weights_of

RESETS = Resets(attention_mask=True, position_ids=True, eod_mask_loss=True)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """Documents that are packed into SAMPLES samples; two are longer than one."""
    dice = torch.Generator().manual_seed(6)
    prefix = tmp_path_factory.mktemp("packed") / "x"
    lengths = [2 * LENGTH + 3, LENGTH + 1]
    room = (SAMPLES - 1) * LENGTH - sum(lengths)
    while room > 0:
        length = min(room, 2 + len(lengths) % (LENGTH // 2))
        lengths.append(length)
        room -= length
    with IndexedWriter(prefix, 53) as writer:
        for length in lengths:
            writer.add_document(torch.randint(0, 53, (length,), generator=dice).tolist())
    return IndexedDataset(prefix)


@pytest.fixture(scope="module")
def share(dataset: IndexedDataset) -> Share:
    samples, _ = split_packed(dataset, LENGTH, 0.0, 0, True, RESETS, "end")
    batch = samples.batch(0, SAMPLES)
    assert batch.mask is not None
    # with SAMPLES samples of an epoch the batch is the data set
    assert len(samples) == SAMPLES
    return Share(
        batch.tokens,
        batch.targets,
        batch.mask.double(),
        packing=Packing(batch.documents, batch.positions),
    )


def one_by_one(name: str, dataset: IndexedDataset) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the plain model on the documents as the file has them; of those longer
    than LENGTH, on each LENGTH tokens."""
    config = CONFIGS[name]
    w = {name: value.clone().requires_grad_() for name, value in weights_of(config).items()}
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for number in range(dataset.num_documents):
        document = torch.from_numpy(dataset.document(number).astype("int64"))
        for start in range(0, len(document), LENGTH):
            targets = document[start + 1 : start + LENGTH + 1]
            inputs = document[start : start + LENGTH]
            logits = oracle.logits(config, w, inputs[None])[0][: len(targets)]
            total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            count += len(targets)
    loss = total / count
    loss.backward()
    return loss.item(), {name: value.grad for name, value in w.items() if value.grad is not None}


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("gpt2", 1, 1),
        ("llama with fewer key heads", 1, 1),
        pytest.param("llama with fewer key heads", 2, 2, marks=pytest.mark.slow),
        pytest.param("mistral with a window", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_packed_samples_train_as_their_documents_do_one_by_one(
    name: str, tp: int, pp: int, dataset: IndexedDataset, share: Share
) -> None:
    ((loss, gradients),) = run_all([name], share, tp, pp)
    expected, theirs = one_by_one(name, dataset)
    assert abs(loss - expected) < 1e-12
    assert gradients.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(gradients[key], value, rtol=1e-12, atol=1e-12)
