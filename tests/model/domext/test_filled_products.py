"""Products of odd widths with zeros beside them, as a card computes them: the same scores, gradients and files."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_words_domext import KINDS, LAYOUTS, make
from tiny_models import VOCAB, make_rows
from torch import Tensor

from domext_ray.model.build import prepare_for_device
from domext_ray.model.domext.layers_domext import HEAD_MULTIPLE, HeadGroup, Linear
from domext_ray.model.domext.words_domext import WORD_MULTIPLE
from domext_ray.training.losses import MaskedLoss
from domext_ray.training.objective import LOSS, MaskedBatch

CPU = torch.device("cpu")
IDS, MASK = make_rows()
POSITIONS = MASK.flatten().nonzero().flatten()[::2]
TOKENS = MASK.flatten().nonzero().flatten()


def fill(model: Any) -> Any:
    """A copy that computes as on a card, with the attention of a CPU."""
    filled = copy.deepcopy(model)
    prepare_for_device(filled, torch.device("cuda"), bf16=False)
    return filled


def compute_loss(model: Any, *, bf16: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a step, and the gradients of all parameters."""
    batch = MaskedBatch(IDS, MASK, None, POSITIONS, IDS.flatten()[POSITIONS], torch.ones(len(POSITIONS)))
    loss = MaskedLoss(model.train(), CPU, bf16=bf16)(batch)[LOSS]
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_beside_a_product_change_no_score_and_no_gradient(kind: str, layout: str) -> None:
    model = make(kind, **LAYOUTS[layout]).double()
    filled = fill(model)
    fillings = [
        module.filling for module in filled.modules() if isinstance(module, Linear) and module.filling is not None
    ]
    assert sum(filling.missing > 0 for filling in fillings) == (kind in ("new words", "exBERT", "all")) + 1 + 8 * (
        kind == "exBERT"
    )
    assert filled.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        given: dict[str, Any] = {"attention_mask": MASK}
        for more in ({}, {"masked_positions": POSITIONS}, {"token_indices": TOKENS}):
            found, expected = filled(IDS, **given, **more).logits, model(IDS, **given, **more).logits
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    loss, gradients = compute_loss(filled)
    expected_loss, expected_gradients = compute_loss(model)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=1e-10)
    loss, gradients = compute_loss(filled.float(), bf16=True)
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients.values())
    torch.testing.assert_close(loss, expected_loss.float(), rtol=0.02, atol=0)


@torch.no_grad()
def test_scores_and_heads_have_widths_that_a_card_is_fast_at() -> None:
    filled = fill(make("exBERT"))
    widths = list[int]()

    def keep(module: HeadGroup, given: Any, result: Any) -> None:
        widths.append(result[0].shape[-1] // module.num_heads)

    for layer in filled.bert.encoder.layer:
        layer.extension.heads.register_forward_hook(keep)
    filled(IDS)
    assert widths == [HEAD_MULTIPLE] * 2
    predictions = fill(make("no word")).cls.predictions
    states = torch.randn(3, predictions.decoder.in_features)
    scores = predictions(states, keeps_filling=True)
    assert scores.shape[-1] % WORD_MULTIPLE == 0 and (scores[:, VOCAB:] == -torch.inf).all()
    assert torch.equal(scores[:, :VOCAB], predictions(states)) and predictions(states).shape[-1] == VOCAB


def test_a_cpu_computes_as_it_did() -> None:
    model = make("exBERT")
    prepare_for_device(model, CPU, bf16=True)
    assert all(module.filling is None for module in model.modules() if isinstance(module, Linear))
    assert not model.cls.predictions.is_filled
