"""How a batch comes to a device."""

from __future__ import annotations

import torch

from domext_ray.training.objective import KeptRows
from domext_ray.training.step import _send, move_batch

CPU = torch.device("cpu")


def test_a_batch_is_sent_as_one_and_arrives_as_it_is() -> None:
    fields = {
        "ids": torch.arange(21).view(3, 7),
        "nothing": None,
        "parts": KeptRows(torch.tensor([2]), torch.tensor([0, 3]), torch.arange(6)[::2], torch.rand(2)),
        "inputs": {"is_token": torch.tensor([True, False, True]), "cu_seq_lens": torch.arange(5, dtype=torch.int32)},
        "count": 7,
        "empty": torch.zeros(0, 4),
        "kinds": torch.arange(5, dtype=torch.uint8),
        "one": torch.tensor(2.5, dtype=torch.float64),
    }
    sent = _send(fields, CPU)
    assert sent.keys() == fields.keys() and sent["nothing"] is None and sent["count"] == 7
    expected, found = (batch | vars(batch["parts"]) | batch["inputs"] for batch in (fields, sent))
    tensors = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)
    assert len({found[name].untyped_storage().data_ptr() for name in tensors}) == 1
    assert move_batch(fields, CPU)["ids"] is fields["ids"], "nothing is copied where the batch is"
