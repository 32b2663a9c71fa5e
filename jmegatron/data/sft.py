r"""Conversations as training samples: loss on the assistant's words, several packed into one sample (no communication).

A file of JSON lines, `{"messages": [{"role": "user", "content": "..."}, ...]}`, a conversation a line. Roles are system
(first, if at all), user, assistant and tool. The template, where the tokenizer has the special tokens of ChatML:

    <|im_start|>user\n  Hi  <|im_end|>\n  <|im_start|>assistant\n  Hello  <|im_end|>\n
                                                                   ^^^^^  ^^^^^^^^^^ labels with loss
    and where it has not, with the end of document of the tokenizer after each message:

    <|user|>\n  Hi  EOD  <|assistant|>\n  Hello  EOD
                                          ^^^^^  ^^^ labels with loss

Markers, role names and contents are tokenised apart, so that it is clear to which a token belongs. A special token
written inside a content is what the tokenizer makes of it.

A conversation of n tokens takes n - 1 places: inputs are all but the last token, labels all but the first. Epochs
shuffle the conversations and put them one after the other into samples of `seq_len` places, a new sample where one
does not fit. The rest of a sample is padding: a segment of its own without loss.

    tokens        u u a a a | u a a | p p       labels        u a a a e | a a e | p p
    position_ids  0 1 2 3 4 | 0 1 2 | 0 1       segment_ids   0 0 0 0 0 | 1 1 1 | 2 2
    loss_mask     0 1 1 1 1 | 1 1 1 | 0 0       (here without markers)

Megatron-LM: training/datasets/sft_dataset.py, which packs only what stands in one line.
"""

import json
import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmegatron.data.preprocess_input import MOST_DOCUMENT_BYTES
from jmegatron.data.split import DEFAULT_SPLIT, SPLIT_NAMES, split_ranges
from jmegatron.data.tokenizers import Tokenizer
from jmegatron.errors import DataFileError, UsageError

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")
_BATCH_LINES = 256


class Encoded(NamedTuple):
    """A conversation as tokens.

    tokens: int32 [tokens]. is_answer: bool [tokens], True where the assistant speaks or ends its turn.
    """

    tokens: np.ndarray
    is_answer: np.ndarray


# --------------------------------------------------------------------------------------------------------- template


class ChatTemplate:
    """Turns messages into tokens, as the module's docstring shows.

    Attributes:
        pad: id that fills samples up.

    Raises:
        UsageError: the tokenizer has neither ChatML's special tokens nor an end of document.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        start, end = tokenizer.special_id("<|im_start|>"), tokenizer.special_id("<|im_end|>")
        if start is not None and end is not None:
            self._heads = {role: np.append(np.int32(start), tokenizer.tokenize(f"{role}\n")) for role in ROLES}
            self._tail, self._end = tokenizer.tokenize("\n"), end
        elif tokenizer.eod is not None:
            self._heads = {role: tokenizer.tokenize(f"<|{role}|>\n") for role in ROLES}
            self._tail, self._end = np.empty(0, np.int32), tokenizer.eod
        else:
            raise UsageError(
                "--sft: the tokenizer has no token to end a message with; expected <|im_start|> and <|im_end|>, or an "
                "end-of-document token; fix: choose a tokenizer that has one"
            )
        self.pad = self._end if tokenizer.eod is None else tokenizer.eod

    def encode(self, conversations: Sequence[Sequence[dict[str, str]]]) -> list[Encoded]:
        """Return the tokens of conversations that `parse_conversation` has returned."""
        contents = iter(self._tokenizer.tokenize_batch([m["content"] for one in conversations for m in one]))
        return [self._encode_one(conversation, contents) for conversation in conversations]

    def _encode_one(self, messages: Sequence[dict[str, str]], contents: Iterator[np.ndarray]) -> Encoded:
        pieces: list[np.ndarray] = []
        answers: list[np.ndarray] = []
        for message in messages:
            head, content = self._heads[message["role"]], next(contents)
            pieces += [head, content, np.array([self._end], np.int32), self._tail]
            spoken = len(content) + 1 if message["role"] == "assistant" and len(content) else 0
            answer = np.zeros(len(head) + len(content) + 1 + len(self._tail), bool)
            answer[len(head) : len(head) + spoken] = True
            answers.append(answer)
        return Encoded(np.concatenate(pieces, dtype=np.int32), np.concatenate(answers))


def parse_conversation(line: bytes) -> list[dict[str, str]]:
    """Return the messages of a line.

    Raises:
        ValueError: says what is wrong with it.
    """
    try:
        document = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))  # a byte order mark, if first
    except RecursionError:
        raise ValueError("objects nested too deeply") from None
    messages = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('no {"messages": [...]} with at least one message')
    return [_check_message(message, place) for place, message in enumerate(messages)]


def _check_message(message: Any, place: int) -> dict[str, str]:
    """Return the role and the content of a message."""
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(f"message {place} is {str(message)[:60]}, expected a role of {', '.join(ROLES)} and a content")
    if role == "system" and place:
        raise ValueError(f"message {place} is the system's, expected only at the start; write a conversation a line")
    content.encode("utf-8")  # refuses lone surrogates
    return {"role": role, "content": content}


# ------------------------------------------------------------------------------------------------------------- file


class ConversationFile:
    """Where each conversation of a file lies and how long it is; the text stays on the disk.

    The file is read and tokenised once, a few lines at a time; 24 bytes a conversation are kept.

    Attributes:
        path: the file.
        template: how messages become tokens.
        num_tokens: int32 [conversations].
        first_answer: int32 [conversations], place of the first token that the assistant speaks.
        num_skipped: lines left out with `skip_bad_lines`.

    Args:
        path: JSON lines, not compressed, since samples are read in any order.
        tokenizer: what makes tokens of the messages.
        skip_bad_lines: leave out lines that cannot be read or in which the assistant says nothing, and count them,
            instead of stopping at the first.

    Raises:
        UsageError: the tokenizer does not serve, or the file holds no conversation.
        DataFileError: the file or a line of it cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], tokenizer: Tokenizer, skip_bad_lines: bool = False):
        self.path = Path(path)
        self.template = ChatTemplate(tokenizer)
        self.num_skipped = 0
        self._skip = skip_bad_lines
        if self.path.suffix in (".gz", ".zst"):
            raise UsageError(f"--sft {self.path}: compressed files cannot be read in any order; fix: unpack it")
        self._begins, self._sizes = array("q"), array("q")
        num_tokens, first_answer = array("i"), array("i")
        try:
            with open(self.path, "rb") as file:
                for encoded in self._encode_all(file):
                    num_tokens.append(len(encoded.tokens))
                    first_answer.append(int(encoded.is_answer.argmax()))
            self._file = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise DataFileError(f"--sft {self.path} cannot be read: {error}; fix: check --data-path") from error
        if not num_tokens:
            raise UsageError(
                f"--sft {self.path}: no conversation, {self.num_skipped} lines left out; fix: check the file"
            )
        self.num_tokens, self.first_answer = np.array(num_tokens, np.int32), np.array(first_answer, np.int32)
        if self.num_skipped:
            logger.warning("%s: %d lines left out of %d", self.path, self.num_skipped, self.num_skipped + len(self))

    def __len__(self) -> int:
        """Return the number of conversations."""
        return len(self._begins)

    def __getitem__(self, number: int) -> Encoded:
        """Return one conversation.

        Raises:
            DataFileError: the file is no longer what it was when it was opened.
        """
        line = os.pread(self._file, self._sizes[number], self._begins[number])
        try:
            (encoded,) = self.template.encode([parse_conversation(line)])
        except ValueError:
            encoded = None
        if encoded is None or len(encoded.tokens) != self.num_tokens[number]:
            raise DataFileError(f"--sft {self.path} has changed since it was opened; fix: start again") from None
        return encoded

    def _encode_all(self, file: Any) -> Iterator[Encoded]:
        """Yield each conversation that can be used, and note where it lies."""
        batch: list[tuple[int, int, int, list[dict[str, str]]]] = []
        begin = 0
        for number, line in enumerate(iter(lambda: file.readline(MOST_DOCUMENT_BYTES + 1), b""), start=1):
            if len(line) > MOST_DOCUMENT_BYTES:
                raise DataFileError(
                    f"--sft {self.path}, line {number}: got more than {MOST_DOCUMENT_BYTES} bytes; fix: cut the "
                    "conversation into several"
                )
            messages = self._parse(line, number)
            if messages is not None:
                batch.append((number, begin, len(line), messages))
            begin += len(line)
            if len(batch) == _BATCH_LINES:
                yield from self._encode_batch(batch)
                batch = []
        yield from self._encode_batch(batch)

    def _parse(self, line: bytes, number: int) -> list[dict[str, str]] | None:
        """Return the messages of a line; None for a blank one or one to be left out."""
        if not line.strip():
            return None
        try:
            messages = parse_conversation(line)
            if not any(message["role"] == "assistant" and message["content"] for message in messages):
                raise ValueError("the assistant says nothing, so there is nothing to learn")
            return messages
        except ValueError as error:
            self._refuse(number, str(error))
            return None

    def _refuse(self, number: int, problem: str) -> None:
        """Stop, or count a line that is left out."""
        if not self._skip:
            raise DataFileError(f"--sft {self.path}, line {number}: {problem}; fix: repair or remove the line")
        self.num_skipped += 1

    def _encode_batch(self, batch: Sequence[tuple[int, int, int, list[dict[str, str]]]]) -> Iterator[Encoded]:
        encoded = self.template.encode([messages for *_, messages in batch])
        for (number, begin, size, _), one in zip(batch, encoded, strict=True):
            if not one.is_answer.any():
                self._refuse(number, "the assistant's words have no token")
                continue
            self._begins.append(begin)
            self._sizes.append(size)
            yield one


# ---------------------------------------------------------------------------------------------------------- samples


def pack(places: Sequence[int], seq_len: int) -> list[int]:
    """Return where samples start: conversations one after the other, a new sample where one does not fit.

    Args:
        places: places of each conversation, each at most `seq_len`.
        seq_len: places of a sample.

    Returns:
        the first conversation of each sample, and the number of conversations.
    """
    starts, used = [0], 0
    for number, size in enumerate(places):
        if used + size > seq_len:
            starts.append(number)
            used = 0
        used += size
    return [*starts, len(places)]


class SFTDataset:
    """Samples of packed conversations in shuffled order; sample i depends on the file, `seq_len`, `seed` and i alone.

    `len()` is the number of samples in all epochs read, at least `num_samples`.

    Attributes:
        num_truncated: conversations longer than a sample, of which only the beginning is used.
        num_unusable: conversations in which the assistant first speaks beyond a sample's end, left out.

    Args:
        conversations: the file.
        conversation_range: [begin, end) of the split.
        num_samples: samples that must be available; None means those of one epoch.
        seq_len: tokens per sample.
        seed: seed of the order.
        split_name: "train", "valid" or "test", for messages.

    Raises:
        UsageError: the split holds no conversation that can be used; a number is out of range.
    """

    def __init__(
        self,
        conversations: ConversationFile,
        conversation_range: tuple[int, int],
        num_samples: int | None,
        seq_len: int,
        seed: int,
        split_name: str = "train",
    ):
        if seq_len < 1 or (num_samples is not None and num_samples < 1) or not 0 <= seed < 2**32:
            raise UsageError(
                f"got --seq-length {seq_len}, {num_samples} samples of {split_name} and --seed {seed}; expected at "
                "least 1, 1 and 0 .. 2**32 - 1"
            )
        self._conversations, self._seq_len = conversations, seq_len
        numbers = np.arange(*conversation_range)
        usable = numbers[conversations.first_answer[numbers] <= seq_len]
        self.num_unusable = len(numbers) - len(usable)
        self.num_truncated = int((conversations.num_tokens[usable] - 1 > seq_len).sum())
        self._tell(split_name, len(numbers))
        if not len(usable):
            raise UsageError(
                f"--split leaves the {split_name} part {len(numbers)} of the {len(conversations)} conversations of "
                f"{conversations.path}, of them {self.num_unusable} too long for --seq-length {seq_len}; expected one "
                "that can be used; fix: a larger share, a longer sequence, or for valid and test --eval-iters 0"
            )
        self._order, self._starts = self._build(usable, num_samples, seed)

    def __len__(self) -> int:
        """Return the number of samples in all epochs read."""
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return one sample.

        Returns:
            `tokens`, `labels`, `position_ids`, `segment_ids` int32 [seq_len] and `loss_mask` float32 [seq_len].

        Raises:
            IndexError: no such sample.
            DataFileError: the file has changed.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index}: expected 0 <= sample < {len(self)}")
        sample = {
            name: np.zeros(self._seq_len, np.int32) for name in ("tokens", "labels", "position_ids", "segment_ids")
        }
        sample["loss_mask"] = np.zeros(self._seq_len, np.float32)
        begin, end = self._starts[index : index + 2].tolist()
        place = 0
        for segment, number in enumerate(self._order[begin:end].tolist()):
            place = self._put(sample, place, segment, self._conversations[number])
        rest = slice(place, None)
        sample["tokens"][rest] = sample["labels"][rest] = self._conversations.template.pad
        sample["position_ids"][rest] = np.arange(self._seq_len - place)
        sample["segment_ids"][rest] = end - begin
        return sample

    def compact(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return the samples `numbers` (integer [samples]) in the form that goes to the devices.

        A conversation's last token is no input, so that labels are no shifted tokens: they are an array of their own.

        Returns:
            `text` (the tokens), `labels`, `position_ids`, `segment_ids` int32 and `loss_mask` bool [samples, seq_len].

        Raises:
            IndexError: no such sample.
            DataFileError: the file has changed.
        """
        samples = [self[number] for number in numbers.tolist()]
        stacked = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        text, loss_mask = stacked.pop("tokens"), stacked.pop("loss_mask").astype(bool)
        return {"text": text, "loss_mask": loss_mask, **stacked}

    def _put(self, sample: dict[str, np.ndarray], place: int, segment: int, conversation: Encoded) -> int:
        """Write a conversation into a sample and return the place after it."""
        size = min(len(conversation.tokens) - 1, self._seq_len)
        where = slice(place, place + size)
        sample["tokens"][where] = conversation.tokens[:size]
        sample["labels"][where] = conversation.tokens[1 : size + 1]
        sample["loss_mask"][where] = conversation.is_answer[1 : size + 1]
        sample["position_ids"][where] = np.arange(size)
        sample["segment_ids"][where] = segment
        return place + size

    def _build(self, usable: np.ndarray, num_samples: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (conversations in the order of all epochs, where each sample starts in it, and the end)."""
        random = np.random.RandomState(seed)
        places = np.minimum(self._conversations.num_tokens - 1, self._seq_len)
        orders: list[np.ndarray] = []
        starts = [0]
        while not orders or (num_samples is not None and len(starts) - 1 < num_samples):
            order = random.permutation(usable)
            before = starts.pop()
            starts += [before + start for start in pack(places[order].tolist(), self._seq_len)]
            orders.append(order)
        return np.concatenate(orders), np.array(starts, np.int64)

    def _tell(self, split_name: str, total: int) -> None:
        """Say aloud what is cut or left out."""
        if self.num_truncated or self.num_unusable:
            logger.warning(
                "%s, %s part: of %d conversations %d are cut off at --seq-length %d, and %d are left out because the "
                "assistant first speaks beyond it",
                self._conversations.path,
                split_name,
                total,
                self.num_truncated,
                self._seq_len,
                self.num_unusable,
            )


SFTSources = tuple[SFTDataset | None, SFTDataset | None, SFTDataset | None]


def build_sft_datasets(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer | None,
    *,
    seq_len: int,
    seed: int = 1234,
    split: str = DEFAULT_SPLIT,
    num_samples: tuple[int | None, int | None, int | None],
    skip_bad_lines: bool = False,
) -> SFTSources:
    """Return (train, valid, test); an entry is None if 0 samples were asked for, or its part holds no conversation.

    Training without conversations stops instead; for the others a line in the log says so.

    Args:
        path: file of conversations (`--data-path` with `--sft`).
        tokenizer: what makes tokens of the messages.
        seq_len: tokens per sample.
        seed: seed of the order.
        split: weights of train, valid, test, in conversations.
        num_samples: samples needed of train, valid, test; None means one epoch.
        skip_bad_lines: see ConversationFile.

    Raises:
        UsageError: no tokenizer, or one that does not serve; no conversation to train on.
        DataFileError: the file or a line of it cannot be used.
    """
    if tokenizer is None:
        raise UsageError("--sft: expected a tokenizer; fix: --tokenizer-type and its file")
    conversations = ConversationFile(path, tokenizer, skip_bad_lines)
    parts: list[SFTDataset | None] = []
    for name, where, samples in zip(SPLIT_NAMES, split_ranges(split, len(conversations)), num_samples, strict=True):
        if where is None or samples == 0:
            parts.append(None)
        elif name != SPLIT_NAMES[0] and where[0] == where[1]:
            logger.warning("--split %s leaves no conversation to the %s part", split, name)
            parts.append(None)
        else:
            parts.append(SFTDataset(conversations, where, samples, seq_len, seed, name))
    train, valid, test = parts
    return train, valid, test
