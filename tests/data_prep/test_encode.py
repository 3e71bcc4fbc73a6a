"""Oracles: transformers renders and tokenises the same rows on its own."""

import pickle

import pytest
from transformers import PreTrainedTokenizerFast

from data_prep.config import DatasetConfig
from data_prep.encode import Encoder
from data_prep.errors import DatasetError, RowError
from data_prep.render import RenderProcess
from data_prep.tokenizer import load_tokenizer
from data_prep.types import EncodedSequence, Record

PLAIN = DatasetConfig(path="rows.jsonl", prompt_column="question", response_column="answer")
CHAT = DatasetConfig(path="rows.jsonl", messages_column="messages")
TALK = (
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "The capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "Of Italy?"},
    {"role": "assistant", "content": "Rome, by the sea \U0001f600."},
)
SAID = ["Paris.<|im_end|>", "Rome, by the sea \U0001f600.<|im_end|>"]
THINK_LAST = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_GENERATION_PROMPT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
)
EOS_AT_THE_END = (  # the shape of Phi-4's template
    "{% for message in messages %}{{ '<|im_start|>' + message.role + message.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% else %}{{ eos_token }}{% endif %}"
)
THINKING_PROMPT = (  # the shape of DeepSeek-R1's template
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>' +"
    " message.content + eos_token }}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><think>\\n' }}{% endif %}"
)
INSTRUCTIONS = (  # the shape of Mistral's template: no header, no generation prompt
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}{{ ' ' + message.content +"
    " eos_token }}{% else %}{{ '[INST] ' + message.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
TEXT_ONLY = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NUMBERED = "{% for message in messages %}{{ messages | length }}: {{ message.content }}\n{% endfor %}"


RENDERER = RenderProcess()


@pytest.fixture(scope="module", autouse=True)
def _render_process_ends():
    yield
    RENDERER.close()


def encode(tokenizer, dataset, values, **changes):
    """The sequence of one row, or the RowError that its reject stands for."""
    dataset = DatasetConfig.model_validate({**dataset.model_dump(), **changes})
    rows = Encoder(tokenizer, dataset, RENDERER).encode([Record(7, values, 0)])
    for reject in rows.rejects:
        raise RowError(reject.reason, reject.snippet)
    return rows.train[0]


def encode_prompt(tokenizer, prompt, response, **changes):
    return encode(tokenizer, PLAIN, {"question": prompt, "answer": response}, **changes)


def encode_chat(tokenizer, messages, **changes):
    return encode(tokenizer, CHAT, {"messages": list(messages)}, **changes)


def supervised_texts(folder, sequence):
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    return [oracle.decode(sequence.input_ids[start:end]) for start, end in sequence.loss_spans]


def test_a_prompt_row_is_bos_prompt_response_eos_with_loss_on_response_and_eos(tokenizer, tokenizer_folder):
    oracle = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    prompt, response = "What is the weather? ", "Sunny, 21 \u00b0C."
    sequence = encode_prompt(tokenizer, prompt, response)
    head, tail = oracle(prompt)["input_ids"], oracle(response, add_special_tokens=False)["input_ids"]
    assert list(sequence.input_ids) == [*head, *tail, oracle.eos_token_id]
    assert sequence.loss_spans == ((len(head), len(head) + len(tail) + 1),)
    assert sequence.source_row == 7
    assert sequence.num_supervised_tokens == len(tail) + 1


def test_a_prompt_that_brings_its_bos_and_a_response_that_brings_its_eos_get_no_second_one(tokenizer):
    assert encode_prompt(tokenizer, "<s>Why?", "So.</s>") == encode_prompt(tokenizer, "Why?", "So.")
    assert encode_prompt(tokenizer, "Why?", "So.").input_ids.count(tokenizer.bos_id) == 1


def test_a_tokenizer_without_bos_adds_none(changed_tokenizer):
    tokenizer = load_tokenizer(changed_tokenizer(bos_token=None))
    assert tokenizer.bos_id is None
    assert encode_prompt(tokenizer, "Why?", "So.").input_ids[: len(tokenizer.encode("Why?"))] == tuple(
        tokenizer.encode("Why?")
    )


def test_the_final_eos_is_a_label_even_when_it_is_the_padding_token(changed_tokenizer):
    tokenizer = load_tokenizer(changed_tokenizer(pad_token="</s>"))
    sequence = encode_prompt(tokenizer, "Why?", "So.")
    assert sequence.input_ids[-1] == tokenizer.eos_id
    assert sequence.loss_spans[-1][1] == len(sequence.input_ids)


def test_a_tokenizer_without_eos_is_refused_for_prompts(changed_tokenizer):
    tokenizer = load_tokenizer(changed_tokenizer(eos_token=None))
    with pytest.raises(DatasetError, match=r"no eos_token.*tokenizer_config\.json"):
        Encoder(tokenizer, PLAIN, RENDERER)


def test_a_marked_conversation_equals_the_rendering_and_mask_of_transformers(tokenizer, tokenizer_folder):
    oracle = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    expected = oracle.apply_chat_template(list(TALK), return_dict=True, return_assistant_tokens_mask=True)
    sequence = encode_chat(tokenizer, TALK)
    assert list(sequence.input_ids) == expected["input_ids"]
    labels = [int(any(start <= p < end for start, end in sequence.loss_spans)) for p in range(len(sequence.input_ids))]
    assert labels == expected["assistant_masks"]
    assert supervised_texts(tokenizer_folder, sequence) == SAID


def test_a_template_without_markers_gives_the_same_labels_as_one_with_them(changed_tokenizer, chatml, tokenizer):
    assert encode_chat(load_tokenizer(changed_tokenizer(chatml)), TALK) == encode_chat(tokenizer, TALK)


def test_a_rendered_conversation_has_exactly_one_bos(tokenizer):
    assert encode_chat(tokenizer, TALK).input_ids.count(tokenizer.bos_id) == 1


def test_a_template_that_writes_bos_twice_is_refused(changed_tokenizer, chatml):
    tokenizer = load_tokenizer(changed_tokenizer("{{ bos_token }}" + chatml))
    with pytest.raises(RowError, match="two BOS"):
        encode_chat(tokenizer, TALK)


def test_a_think_block_that_only_the_last_turn_has_is_masked_from_the_full_render(changed_tokenizer):
    folder = changed_tokenizer(THINK_LAST)
    sequence = encode_chat(load_tokenizer(folder), TALK)
    assert supervised_texts(folder, sequence) == [SAID[0], "<think>\n\n</think>\n\n" + SAID[1]]
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    assert list(sequence.input_ids) == oracle.apply_chat_template(list(TALK))["input_ids"]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (EOS_AT_THE_END, ["<|im_end|>", "<|im_end|></s>"]),
        (THINKING_PROMPT, ["</s>", "</s>"]),
        (INSTRUCTIONS, ["</s>", "</s>"]),
        (TEXT_ONLY, ["\n", "\n"]),
    ],
)
def test_only_what_the_assistant_says_is_supervised_whatever_the_template_does_at_its_end(
    changed_tokenizer, template, ends
):
    folder = changed_tokenizer(template)
    sequence = encode_chat(load_tokenizer(folder), TALK)
    texts = [text.lstrip(" ") for text in supervised_texts(folder, sequence)]
    assert texts == [TALK[2]["content"] + ends[0], TALK[4]["content"] + ends[1]]
    oracle = PreTrainedTokenizerFast.from_pretrained(folder)
    assert list(sequence.input_ids) == oracle.apply_chat_template(list(TALK))["input_ids"]


def test_a_turn_that_never_ends_in_the_full_render_is_refused_not_run_into_the_next_one(changed_tokenizer):
    # The end-of-turn token closes user turns and the last assistant turn, but no earlier assistant turn.
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + message.content }}"
        "{% if message.role != 'assistant' or loop.last %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    with pytest.raises(RowError, match="cannot be located"):
        encode_chat(load_tokenizer(changed_tokenizer(template)), TALK)


def test_an_end_of_turn_token_inside_a_turn_that_the_template_rewrites_refuses_the_row(changed_tokenizer):
    tokenizer = load_tokenizer(changed_tokenizer(THINK_LAST))
    messages = [dict(message) for message in TALK]
    messages[2]["content"] = "Paris<|im_end|>."
    with pytest.raises(RowError, match="cannot be located"):
        encode_chat(tokenizer, messages)


def test_a_template_without_generation_prompt_puts_no_loss_on_the_header(changed_tokenizer):
    folder = changed_tokenizer(NO_GENERATION_PROMPT)
    messages = [*TALK, {"role": "user", "content": "And?"}, {"role": "assistant", "content": " assistant "}]
    sequence = encode_chat(load_tokenizer(folder), messages)
    assert supervised_texts(folder, sequence)[:2] == SAID
    assert supervised_texts(folder, sequence)[2].lstrip().startswith("assistant ")
    assert "<|im_start|>" not in "".join(supervised_texts(folder, sequence))


def test_a_conversation_that_the_assistant_opens_is_supervised_from_its_content(changed_tokenizer, chatml):
    folder = changed_tokenizer(chatml)
    messages = ({"role": "assistant", "content": "Hello."}, *TALK[1:])
    assert supervised_texts(folder, encode_chat(load_tokenizer(folder), messages)) == ["Hello.<|im_end|>", *SAID]


@pytest.mark.parametrize(
    "template",
    [
        NUMBERED,
        "{{ messages | length }}{% for message in messages %}{{ message.content + '<|im_end|>' }}{% endfor %}",
        "{% for message in messages %}{{ (message.content | upper) + '<|im_end|>' }}{% endfor %}",
    ],
)
def test_a_template_that_rewrites_turns_beyond_recognition_is_refused_with_the_remedy(changed_tokenizer, template):
    with pytest.raises(RowError, match=r"mark them with \{% generation %\}"):
        encode_chat(load_tokenizer(changed_tokenizer(template)), TALK)


def test_messages_without_a_chat_template_are_refused_with_the_remedy(changed_tokenizer):
    with pytest.raises(DatasetError, match=r"dataset\.messages_column is 'messages'.*chat_template\.jinja"):
        Encoder(load_tokenizer(changed_tokenizer("")), CHAT, RENDERER)


def test_a_chat_template_that_does_not_compile_stops_the_tenant(changed_tokenizer):
    with pytest.raises(DatasetError, match="does not compile, line 1"):
        encode_chat(load_tokenizer(changed_tokenizer("{% for %}")), TALK)


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}"])
def test_a_template_that_refuses_a_row_gives_its_words_as_detail_only(changed_tokenizer, template):
    with pytest.raises(RowError) as caught:
        encode_chat(load_tokenizer(changed_tokenizer(template)), TALK)
    assert caught.value.reason == "the chat template refuses the row"
    assert "must alternate" in caught.value.detail or "ZeroDivision" in caught.value.detail


def test_a_chat_template_cannot_reach_python(changed_tokenizer):
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RowError, match="reaches for an attribute that templates may not read"):
        encode_chat(load_tokenizer(changed_tokenizer(escape)), TALK)


def test_a_conversation_without_an_assistant_turn_is_rejected(tokenizer):
    with pytest.raises(RowError, match="no assistant turn"):
        encode_chat(tokenizer, TALK[:2])


def test_a_row_without_a_label_is_rejected_and_position_0_is_never_one(changed_tokenizer, tokenizer):
    silent = "{% for message in messages %}{{ message.content }}{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(RowError, match="no token to learn"):
        encode_chat(load_tokenizer(changed_tokenizer(silent)), TALK)
    bare = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    sequence = encode_chat(load_tokenizer(changed_tokenizer(bare)), TALK[2:3])
    assert sequence.loss_spans == ((1, len(sequence.input_ids)),)


def test_a_row_of_exactly_max_length_stays_and_one_token_more_is_dropped(tokenizer):
    num_tokens = len(encode_prompt(tokenizer, "Why?", "So.").input_ids)
    assert encode_prompt(tokenizer, "Why?", "So.", max_length=num_tokens) == encode_prompt(tokenizer, "Why?", "So.")
    with pytest.raises(RowError, match=r"longer than dataset\.max_length"):
        encode_prompt(tokenizer, "Why?", "So.", max_length=num_tokens - 1)


def test_an_overlong_row_under_the_error_policy_stops_with_row_length_and_remedy(tokenizer):
    with pytest.raises(DatasetError, match=r"row 7 of rows\.jsonl has \d+ tokens, .*max_length 2; raise it"):
        encode_prompt(tokenizer, "Why?", "So.", max_length=2, overlong="error")


def test_a_truncated_row_loses_its_right_end_and_without_a_label_left_it_is_rejected(tokenizer):
    whole = encode_prompt(tokenizer, "Why?", "So it is.")
    ((start, end),) = whole.loss_spans
    for length in range(start + 1, end + 1):
        cut = encode_prompt(tokenizer, "Why?", "So it is.", max_length=length, overlong="truncate")
        assert cut.input_ids == whole.input_ids[:length]
        assert cut.loss_spans == ((start, length),)
    with pytest.raises(RowError, match=r"no token to learn within dataset\.max_length"):
        encode_prompt(tokenizer, "Why?", "So it is.", max_length=start, overlong="truncate")


def test_truncation_keeps_whole_turns_before_the_cut_and_part_of_the_one_it_hits(tokenizer):
    whole = encode_chat(tokenizer, TALK)
    (first, (start, end)) = whole.loss_spans
    cut = encode_chat(tokenizer, TALK, max_length=end - 1, overlong="truncate")
    assert cut.loss_spans == (first, (start, end - 1))
    assert encode_chat(tokenizer, TALK, max_length=start, overlong="truncate").loss_spans == (first,)


@pytest.mark.parametrize("spans", [((0, 2),), ((2, 2),), ((1, 5),), ((1, 2), (2, 3)), ((3, 4), (1, 2))])
def test_spans_that_no_loss_could_use_cannot_be_built(spans):
    with pytest.raises(ValueError, match="loss spans"):
        EncodedSequence((1, 2, 3, 4), spans)


def test_row_errors_travel_between_processes_and_show_no_row_text():
    error = pickle.loads(pickle.dumps(RowError("chat template refuses the conversation", "hunter2")))
    assert (error.reason, error.detail) == ("chat template refuses the conversation", "hunter2")
    assert "hunter2" not in str(error)
