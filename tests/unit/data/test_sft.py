"""Conversations as samples: the template, the loss mask, packing against a plain loop, order, hostile lines."""

import itertools
import json
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmegatron.data.sft import ChatTemplate, ConversationFile, SFTDataset, build_sft_datasets, pack
from jmegatron.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from jmegatron.errors import DataFileError, UsageError

EOD = ByteTokenizer.eod
BYTES = ByteTokenizer()


def _say(*pairs):
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def _write(path, *conversations):
    path.write_text("".join(json.dumps(one) + "\n" for one in conversations))
    return path


def _random_conversations(count, seed=0):
    rng = np.random.RandomState(seed)
    word = lambda: "x" * rng.randint(1, 30)  # noqa: E731
    return [
        _say(*[pair for _ in range(rng.randint(1, 4)) for pair in (("user", word()), ("assistant", word()))])
        for _ in range(count)
    ]


# --------------------------------------------------------------------------------------------------------- template


def test_plain_template_gives_loss_to_the_answer_and_its_end():
    (one,) = ChatTemplate(BYTES).encode([_say(("user", "Hi"), ("assistant", "Yo"))["messages"]])
    answer = b"<|assistant|>\n"
    assert one.tokens.tolist() == [*b"<|user|>\nHi", EOD, *answer, *b"Yo", EOD]
    assert one.is_answer.tolist() == [False] * (9 + 2 + 1 + len(answer)) + [True] * 3


def test_empty_answer_has_no_loss():
    (one,) = ChatTemplate(BYTES).encode([_say(("assistant", ""), ("assistant", "a"))["messages"]])
    assert one.is_answer.sum() == 2


@pytest.fixture
def chatml(tmp_path):
    """A byte-level tokenizer with ChatML's special tokens 256 and 257."""
    from jmegatron.data.tokenizers.training import save_tokenizer, train_bpe

    save_tokenizer(train_bpe(["a"], 259, ["<|im_start|>", "<|im_end|>"]), tmp_path / "t")
    return HuggingFaceTokenizer(tmp_path / "t")


def test_special_tokens_mark_the_roles_where_the_tokenizer_has_them(chatml):
    start, end = chatml.special_id("<|im_start|>"), chatml.special_id("<|im_end|>")
    (one,) = ChatTemplate(chatml).encode([_say(("user", "Hi"), ("assistant", "Yo"))["messages"]])
    ids = lambda text: chatml.tokenize(text).tolist()  # noqa: E731
    wanted = [start, *ids("user\n"), *ids("Hi"), end, *ids("\n")]
    wanted += [start, *ids("assistant\n"), *ids("Yo"), end, *ids("\n")]
    assert one.tokens.tolist() == wanted
    assert chatml.detokenize(one.tokens[one.is_answer]) == "Yo"
    assert one.tokens[one.is_answer][-1] == end
    assert ChatTemplate(chatml).pad == chatml.eod


def test_tokenizer_that_cannot_end_a_message_is_refused():
    class Endless(ByteTokenizer):
        eod = None

    with pytest.raises(UsageError, match="--sft: the tokenizer has no token to end a message"):
        ChatTemplate(Endless())


# ---------------------------------------------------------------------------------------------------------- samples


def _plain_samples(conversations, order, seq_len):
    """The samples of one epoch, by a loop over tokens."""
    samples, sample, segment = [], [], 0
    for number in order:
        pairs = _plain_pairs(conversations[number]["messages"])[:seq_len]
        if len(sample) + len(pairs) > seq_len:
            samples.append((sample, segment))
            sample, segment = [], 0
        sample = sample + [(*pair, place, segment) for place, pair in enumerate(pairs)]
        segment += 1
    samples.append((sample, segment))
    padded = []
    for sample, segment in samples:
        rest = [(EOD, EOD, 0, place, segment) for place in range(seq_len - len(sample))]
        padded.append(np.array(sample + rest).T)
    return padded


def _plain_pairs(messages):
    """(token, label, loss) of each place of a conversation."""
    stream = []
    for message in messages:
        stream += [(token, 0) for token in f"<|{message['role']}|>\n".encode()]
        spoken = int(message["role"] == "assistant")
        stream += [(token, spoken) for token in [*message["content"].encode(), EOD]]
    return [(a, b, loss) for (a, _), (b, loss) in itertools.pairwise(stream)]


def test_compact_form_holds_the_same_samples(tmp_path):
    file = ConversationFile(_write(tmp_path / "a.jsonl", *_random_conversations(12)), BYTES)
    data = SFTDataset(file, (0, 12), None, 200, seed=7)
    numbers = np.arange(len(data))[::-1]
    compact = data.compact(numbers)
    assert compact["loss_mask"].dtype == bool
    assert set(compact) == {"text", "labels", "loss_mask", "position_ids", "segment_ids"}
    for row, number in enumerate(numbers.tolist()):
        for name, values in data[number].items():
            np.testing.assert_array_equal(compact["text" if name == "tokens" else name][row], values)


@pytest.mark.parametrize(("seq_len", "num_samples"), [(200, None), (200, 70), (1000, 3), (64, 11)])
def test_samples_are_those_of_a_plain_loop(tmp_path, seq_len, num_samples):
    conversations = _random_conversations(40)
    file = ConversationFile(_write(tmp_path / "a.jsonl", *conversations), BYTES)
    data = SFTDataset(file, (0, 40), num_samples, seq_len, seed=7)
    random, wanted = np.random.RandomState(7), []
    while len(wanted) < (num_samples or 1):
        wanted += _plain_samples(conversations, random.permutation(40), seq_len)
    assert len(data) == len(wanted) >= (num_samples or 1)
    for index, (tokens, labels, loss, positions, segments) in enumerate(wanted):
        sample = data[index]
        np.testing.assert_array_equal(sample["tokens"], tokens)
        np.testing.assert_array_equal(sample["labels"], labels)
        np.testing.assert_array_equal(sample["loss_mask"], loss)
        np.testing.assert_array_equal(sample["position_ids"], positions)
        np.testing.assert_array_equal(sample["segment_ids"], segments)
        assert {name: array.dtype for name, array in sample.items()} == {
            "tokens": np.int32,
            "labels": np.int32,
            "loss_mask": np.float32,
            "position_ids": np.int32,
            "segment_ids": np.int32,
        }


@given(st.lists(st.integers(0, 10), min_size=1), st.integers(10, 30))
def test_packing_keeps_the_order_and_never_overfills(places, seq_len):
    starts = pack(places, seq_len)
    assert starts[0] == 0
    assert starts[-1] == len(places)
    for at, (begin, end) in enumerate(itertools.pairwise(starts)):
        assert begin < end
        assert sum(places[begin:end]) <= seq_len
        if at + 2 < len(starts):  # the next one did not fit
            assert sum(places[begin : end + 1]) > seq_len


def test_order_depends_on_the_seed_and_more_samples_keep_the_first(tmp_path):
    file = ConversationFile(_write(tmp_path / "a.jsonl", *_random_conversations(40)), BYTES)
    few, many = (SFTDataset(file, (0, 40), count, 200, seed=1) for count in (5, 100))
    other = SFTDataset(file, (0, 40), 5, 200, seed=2)
    for index in range(len(few)):
        np.testing.assert_array_equal(few[index]["tokens"], many[index]["tokens"])
    assert any((few[index]["tokens"] != other[index]["tokens"]).any() for index in range(3))
    with pytest.raises(IndexError):
        few[len(few)]


def test_long_conversations_are_cut_or_left_out_aloud(tmp_path, caplog):
    cut = _say(("assistant", "a" * 100))
    silent = _say(("user", "u" * 100), ("assistant", "a"))
    file = ConversationFile(_write(tmp_path / "a.jsonl", cut, silent, _say(("assistant", "b"))), BYTES)
    with caplog.at_level(logging.WARNING):
        data = SFTDataset(file, (0, 3), None, 32, seed=1)
    assert (data.num_truncated, data.num_unusable) == (1, 1)
    assert "of 3 conversations 1 are cut off at --seq-length 32, and 1 are left out" in caplog.text
    assert sorted(sample["loss_mask"].sum() for sample in (data[0], data[1])) == [2, 32 - 13]
    with pytest.raises(UsageError, match="1 too long for --seq-length 32"):
        SFTDataset(file, (1, 2), None, 32, seed=1)


def test_three_parts(tmp_path):
    path = _write(tmp_path / "a.jsonl", *_random_conversations(50))
    train, valid, test = build_sft_datasets(path, BYTES, seq_len=128, split="80,20,0", num_samples=(10, 4, 4))
    assert len(train) >= 10
    assert len(valid) >= 4
    assert test is None
    small = build_sft_datasets(path, BYTES, seq_len=128, split="999,1", num_samples=(10, 4, 4))
    assert small[1] is None
    with pytest.raises(UsageError, match="expected a tokenizer"):
        build_sft_datasets(path, None, seq_len=128, num_samples=(1, 1, 1))


# ------------------------------------------------------------------------------------------------------ bad input

GOOD = json.dumps(_say(("user", "u"), ("assistant", "a"))).encode()
BAD = {
    "no JSON": (b"{", "line 3: Expecting"),
    "no UTF-8": (b"\xff", "line 3: .*can't decode"),
    "no object": (b"[1]", 'line 3: no {"messages"'),
    "no messages": (b'{"messages": []}', 'line 3: no {"messages"'),
    "a role nobody has": (b'{"messages": [{"role": "x", "content": "a"}]}', "line 3: message 0 is .* expected a role"),
    "a role that is a list": (b'{"messages": [{"role": ["user"], "content": "a"}]}', "line 3: message 0 is"),
    "no content": (b'{"messages": [{"role": "user"}]}', "line 3: message 0 is .* a content"),
    "a late system": (json.dumps(_say(("assistant", "a"), ("system", "s"))).encode(), "only at the start"),
    "a surrogate": (b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "surrogates"),
    "nested deeply": (b"[" * 100_000, "nested too deeply"),
    "no assistant": (json.dumps(_say(("user", "u"))).encode(), "the assistant says nothing"),
    "an empty assistant": (json.dumps(_say(("assistant", ""))).encode(), "the assistant says nothing"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_line_is_fatal_and_named_or_counted(tmp_path, kind, caplog):
    line, message = BAD[kind]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\n\n" + line + b"\n" + GOOD)
    with pytest.raises(DataFileError, match=rf"--sft .*a\.jsonl, .*{message}"):
        ConversationFile(path, BYTES)
    with caplog.at_level(logging.WARNING):
        file = ConversationFile(path, BYTES, skip_bad_lines=True)
    assert (len(file), file.num_skipped) == (2, 1)
    assert "1 lines left out of 3" in caplog.text
    for number in (0, 1):
        assert bytes(file[number].tokens[-2:-1].astype(np.uint8)) == b"a"


def test_file_that_cannot_be_used_gives_one_message(tmp_path):
    with pytest.raises(DataFileError, match=r"--sft .*nowhere cannot be read"):
        ConversationFile(tmp_path / "nowhere", BYTES)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="no conversation"):
        ConversationFile(tmp_path / "empty.jsonl", BYTES)
    with pytest.raises(UsageError, match=r"a\.jsonl\.gz: compressed"):
        ConversationFile(tmp_path / "a.jsonl.gz", BYTES)


def test_file_that_changes_under_a_run_stops_it(tmp_path):
    path = _write(tmp_path / "a.jsonl", _say(("assistant", "abc")))
    file = ConversationFile(path, BYTES)
    path.write_bytes(path.read_bytes().replace(b"abc", b"a  "[:2] + b"\xff"))
    with pytest.raises(DataFileError, match="has changed"):
        file[0]
