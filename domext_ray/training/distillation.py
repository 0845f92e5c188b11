"""New words that start where the base's pieces of them lead: their vectors are fitted before the first step.

Enters: a model at its start, the new words, and the prepared corpus. Leaves: new rows of the word table, and biases.

Source: Dobler, Elliott and de Melo, "Token Distillation: Attention-Aware Input Embeddings for New Tokens", 2025
(arXiv 2505.20133). A new word's vector is fitted so that the frozen model's hidden states with that one token are those
with the pieces. The paper has decoders and their last layer. Deviations: an encoder's states on both sides of the word
count, and those of a word in several tokens are averaged; all new words of a snippet are replaced at once; the states
are those of the lower half of the layers, which costs half and brought as much. The rows are tied to the output, where
the paper has no answer: here each word's bias is such that the model predicts it as often as the text has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from domext_ray.config.pretrain import ObjectiveConfig
from domext_ray.corpus.draws import Purpose, hash_counters
from domext_ray.corpus.manifest import Manifest
from domext_ray.corpus.snippets import SnippetRequest, get_or_find_snippets, read_snippets
from domext_ray.model.build import bypass_extensions
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.progress import format_seconds
from domext_ray.training.evaluate import build_domain_set
from domext_ray.training.run import Inputs
from domext_ray.training.step import move_batch
from domext_ray.vocabulary.extension import base_token_ids, load_extension
from domext_ray.vocabulary.family import tokenizer_family
from domext_ray.vocabulary.tokenizer import load_tokenizer

NUM_SNIPPETS = 4_000
"""Snippets that few words share between them; a word has at least and at most as many as `SNIPPETS_PER_WORD` says."""
SNIPPETS_PER_WORD = 6, 100
SNIPPET_TOKENS = 24
SNIPPETS_PER_STEP = 32
MIN_STEPS = 100
"""Of few snippets fewer are read per step."""
RELATIVE_LR = 0.03
"""Adam's rate at the start, as a share of the standard deviation of the base's word table; it falls to 0."""
BIAS_TOKENS = 16_384
"""Tokens of the text, in their natural mixture, of which some are masked to fit the biases."""
BIAS_ROUNDS = 20
TELL_SECONDS = 30.0


Word = tuple[tuple[int, ...], tuple[int, ...]]
"""A word of a snippet: its tokens with the new words, and the base's."""


def choose_snippets(inputs: Inputs, seed: int) -> None:
    """Store beside a run's corpus what every rank fits its new words on; before the ranks start."""
    folder = inputs.tokenizer.local()
    extension = load_extension(folder)
    assert extension is not None, "PretrainConfig refuses to fit none"
    get_or_find_snippets(_ask_for_snippets(inputs.domain, load_tokenizer(folder), extension.first_id, seed))


def _ask_for_snippets(
    manifest: Manifest, tokenizer: PreTrainedTokenizerBase, first_id: int, seed: int
) -> SnippetRequest:
    family, entries = tokenizer_family(tokenizer), _list_entries(tokenizer)
    is_continuation = np.array([family.is_continuation(each) for each in entries])
    least, most = SNIPPETS_PER_WORD
    per_word = min(most, max(least, NUM_SNIPPETS // (len(entries) - first_id)))
    return SnippetRequest(manifest, is_continuation, first_id, per_word, SNIPPET_TOKENS, seed)


def _list_entries(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The vocabulary by id; ids without an entry are empty."""
    entries = {number: entry for entry, number in tokenizer.get_vocab().items()}
    return [entries.get(number, "") for number in range(max(entries) + 1)]


def distill_new_words(
    model: DomextForMaskedLM,
    manifest: Manifest,
    tokenizer: PreTrainedTokenizerBase,
    base_tokenizer: PreTrainedTokenizerBase,
    objective: ObjectiveConfig,
    *,
    seed: int,
    device: torch.device,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Fit the new words' vectors and biases; nothing else of the model changes.

    A word that the training rows do not have keeps its vector. The result depends on the arguments alone, on a CPU to
    the last digit. The model is at its start, the new words at the mean of their pieces, on the CPU, where it is
    afterwards. `choose_snippets` came before; `seed` decides which are read, and in which order.
    """
    started = time.monotonic()
    first_id = cast(DomextConfig, model.config).base_vocab_size
    request = _ask_for_snippets(manifest, tokenizer, first_id, seed)
    snippets = read_snippets(request)
    num_missing = int((snippets.counts == 0).sum())
    tell(f"new words: fitting {len(snippets.counts) - num_missing:,} to the base on {len(snippets.ids):,} snippets")
    module = cast(nn.Module, model)
    was_training = module.training
    module.to(device).eval()
    with bypass_extensions(module):
        longest = cast(DomextConfig, model.config).max_row_length - 2
        words = _split_words(snippets.ids, request, tokenizer, base_tokenizer, longest)
        order = np.argsort(hash_counters(seed, Purpose.SNIPPETS, np.arange(len(words))), kind="stable")
        _fit_embeddings(model, [words[i] for i in order], tokenizer, tell)
        num_rows = max(1, BIAS_TOKENS // manifest.seq_length)
        known = build_domain_set(manifest, tokenizer, objective, num_rows=num_rows, batch_size=16, split="train")
        # A word that is nowhere counts as half an occurrence, so that it is hardly predicted.
        frequencies = torch.from_numpy((snippets.counts + 0.5) / snippets.num_tokens)
        fit_biases(model, *_score_known(model, known.batches), frequencies)
    module.to("cpu").train(was_training)
    missing = f"; {num_missing:,} that no row has start from the mean of their pieces" if num_missing else ""
    tell(f"new words: fitted in {format_seconds(time.monotonic() - started)}{missing}")


def _split_words(
    snippets: Sequence[np.ndarray],
    request: SnippetRequest,
    tokenizer: PreTrainedTokenizerBase,
    base_tokenizer: PreTrainedTokenizerBase,
    longest: int,
) -> list[list[Word]]:
    """Cut snippets into words, each with its tokens of both vocabularies, as many as the base's row has room for."""
    family, entries = tokenizer_family(tokenizer), _list_entries(tokenizer)
    split = [
        [tuple(each.tolist()) for each in np.split(ids, np.flatnonzero(~request.is_continuation[ids])) if len(each)]
        for ids in snippets
    ]
    changed = sorted({word for words in split for word in words if max(word) >= request.first_id})
    names = [family.to_name(*[entries[each] for each in word]) for word in changed]
    pieces = dict(zip(changed, map(tuple, base_token_ids(base_tokenizer, names)), strict=True))
    found = []
    for words in split:
        both = [(word, pieces.get(word, word)) for word in words]
        ends = np.cumsum([len(own) for _, own in both])
        found.append(both[: int(np.searchsorted(ends, longest, side="right"))])
    return found


def _lay_out(
    snippets: Sequence[Sequence[Word]], side: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, Tensor]:
    """Make the rows of one vocabulary (`Word`), [CLS], the words, [SEP]: ids and words' numbers, int64 [B, N].

    The same words have the same numbers, counted over the batch; padding has -1.
    """
    rows, numbers, first = [], [], 0
    for words in snippets:
        tokens = [(tokenizer.cls_token_id,), *(word[side] for word in words), (tokenizer.sep_token_id,)]
        rows.append(torch.tensor([each for token in tokens for each in token]))
        numbers.append(torch.tensor([first + place for place, token in enumerate(tokens) for _ in token]))
        first += len(tokens)
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    return ids, nn.utils.rnn.pad_sequence(numbers, batch_first=True, padding_value=-1)


def _fit_embeddings(
    model: DomextForMaskedLM,
    snippets: Sequence[Sequence[Word]],
    tokenizer: PreTrainedTokenizerBase,
    tell: Callable[[str], None],
) -> None:
    """Fit the new rows of the word table by one pass over the snippets."""
    embeddings = model.bert.embeddings
    known, new = embeddings.word_embeddings.weight.detach(), cast(nn.Embedding, embeddings.extension).weight
    table = nn.Parameter(new.detach().float().clone())
    optimizer = torch.optim.Adam([table], lr=RELATIVE_LR * float(known.float().std()), betas=(0.9, 0.99))
    size = max(1, min(SNIPPETS_PER_STEP, len(snippets) // MIN_STEPS))
    steps = -(-len(snippets) // size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    started = told = time.monotonic()
    for step in range(steps):
        batch = snippets[step * size : (step + 1) * size]
        with torch.no_grad():
            target = _encode(model, table, *_lay_out(batch, 1, tokenizer))
        loss = nn.functional.mse_loss(_encode(model, table, *_lay_out(batch, 0, tokenizer)), target)
        (table.grad,) = torch.autograd.grad(loss, table)
        optimizer.step()
        schedule.step()
        if time.monotonic() - told > TELL_SECONDS:
            told = time.monotonic()
            left = (told - started) / (step + 1) * (steps - step - 1)
            tell(f"new words: {(step + 1) / steps:.0%} of the snippets read, {format_seconds(left)} left")
    with torch.no_grad():
        new.copy_(table)


def _encode(model: DomextForMaskedLM, table: Tensor, ids: Tensor, words: Tensor) -> Tensor:
    """Return the mean state of each word of a batch after the lower half of the layers, [words, d]."""
    bert, config = model.bert, cast(DomextConfig, model.config)
    ids, words = ids.to(table.device), words.to(table.device)
    new_ids, is_token = ids - config.base_vocab_size, words >= 0
    known = bert.embeddings.word_embeddings(ids.masked_fill(new_ids >= 0, 0)).to(table.dtype)
    vectors = torch.where((new_ids >= 0)[..., None], nn.functional.embedding(new_ids.clamp_min(0), table), known)
    num_layers = -(-config.num_hidden_layers // 2)
    encoded = bert(None, is_token.long(), inputs_embeds=vectors, pool=False, num_layers=num_layers)
    states = encoded.last_hidden_state
    numbers, values = words[is_token], states[is_token]
    sums = values.new_zeros(int(numbers.max()) + 1, values.shape[-1]).index_add(0, numbers, values)
    return sums / torch.bincount(numbers)[:, None]


@torch.no_grad()
def _score_known(model: DomextForMaskedLM, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return the head's states at the predicted positions, [P, d], and the base's words' log partition there, [P]."""
    states, known, head = [], [], model.cls.predictions
    for batch in batches:
        given = move_batch(batch, head.bias.device)
        rows = (given[name] for name in ("input_ids", "attention_mask", "token_type_ids"))
        encoded = model.bert(*rows, pool=False).last_hidden_state.flatten(0, 1)
        transformed = head.transform(encoded[given["masked_positions"][given["weights"] > 0]], [])
        states.append(transformed)
        known.append(head.decoder(transformed, []).float().logsumexp(dim=-1))
    return torch.cat(states), torch.cat(known)


@torch.no_grad()
def fit_biases(model: DomextForMaskedLM, states: Tensor, known: Tensor, frequencies: Tensor) -> None:
    """Set the new words' biases so that the model predicts each as often as the text has it.

    At the best biases of a softmax, the predicted probabilities of a word sum up to its occurrences; each round scales
    every word by what is missing (iterative scaling, Darroch and Ratcliff 1972).
    States are the head's at P predicted positions, [P, d]; `known` is the log of the sum of the base's words'
    exponentiated scores there, [P]; `frequencies`, [E] and above 0, are each new word's share of all tokens.
    """
    if not len(states):
        return
    head = cast(nn.Linear, model.cls.predictions.extension)
    scores = (states.to(head.weight.dtype) @ head.weight.T).float()
    wanted = (frequencies.to(scores.device, torch.float32) * len(scores)).log()
    fitted = torch.zeros_like(wanted)
    for _ in range(BIAS_ROUNDS):
        each = scores + fitted
        total = torch.logaddexp(known, each.logsumexp(dim=-1))
        fitted += wanted - (each - total[:, None]).logsumexp(dim=0)
    head.bias.copy_(fitted)
