"""Rows of every format to conversations, by hand; and the real files of each where they are at hand."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.schema import RowFormat, TrainOn
from toolkit.data.detection import detect_format
from toolkit.data.formats import Conversation, RowReader, mark_trained
from toolkit.data.too_long import turns
from toolkit.messages import RowError, set_language


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def read(row: dict[str, Any], row_format: RowFormat = RowFormat.auto, **columns: str) -> Conversation:
    if row_format is RowFormat.auto:
        row_format = detect_format(row, columns)
    return RowReader(row_format, columns).read(row)


WEATHER = {"name": "weather", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "p", "response": "r", "system": "s"}, [system("s"), user("p"), assistant("r")]),
        ({"prompt": "p", "response": "r", "system": ""}, [user("p"), assistant("r")]),
        (
            {"instruction": "i", "input": "x", "output": "o", "system": "s", "history": '[["a", "b"]]'},
            [system("s"), user("a"), assistant("b"), user("i\nx"), assistant("o")],
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "北京"}}'},
                    {"from": "observation", "value": '{"t": 3}'},
                    {"from": "gpt", "value": "cold"},
                ],
            },
            [
                system("s"),
                user("q"),
                assistant("", tool_calls=[call("weather", city="北京")]),
                tool('{"t": 3}'),
                assistant("cold"),
            ],
        ),
        (
            {"system": "s", "conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            [system("s"), user("q"), assistant("a")],
        ),
        (  # ChatGLM3's own
            {
                "conversations": [
                    {"role": "user", "content": "q"},
                    {"role": "tool", "name": "weather", "parameters": {"city": "x"}, "observation": {"t": 1}},
                    {"role": "assistant", "content": "a"},
                ]
            },
            [user("q"), assistant("", tool_calls=[call("weather", city="x")]), tool('{"t": 1}'), assistant("a")],
        ),
        (  # ms-swift's and ModelScope's
            {"query": "p", "response": "r", "system": "s", "history": [["a", "b"]]},
            [system("s"), user("a"), assistant("b"), user("p"), assistant("r")],
        ),
        (
            {
                "system": "s",
                "conversation": [{"human": "q", "assistant": "a", "id": 3}, {"human": "p", "assistant": "b"}],
            },
            [system("s"), user("q"), assistant("a"), user("p"), assistant("b")],
        ),
        (  # calls follow the text of their turn, and each other
            {
                "messages": [
                    user("q"),
                    assistant("Let me see.", loss=False),
                    {"role": "tool_call", "content": '{"name": "f", "arguments": {"a": 1}}', "loss": False},
                    {"role": "tool_call", "content": '{"name": "g", "arguments": "{\\"b\\": 2}"}', "loss": False},
                    {"role": "tool_response", "content": '{"t": 1}'},
                    {"role": "tool_response", "content": "two"},
                    {"role": "assistant", "content": "a", "loss_scale": 1.0},
                ]
            },
            [
                user("q"),
                assistant("Let me see.", loss=False, tool_calls=[call("f", a=1), call("g", b=2)]),
                tool('{"t": 1}'),
                tool("two"),
                assistant("a", loss=True),
            ],
        ),
        (  # LLaMA-Factory's reasoning before a call
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '<think>\nHm.\n</think>\n\n{"name": "f", "arguments": ""}'},
                    {"from": "observation", "value": "o"},
                    {"from": "gpt", "value": "<think>\nHm.\n</think>\n\na"},
                ]
            },
            [
                user("q"),
                assistant("<think>\nHm.\n</think>", tool_calls=[call("f")]),
                tool("o"),
                assistant("<think>\nHm.\n</think>\n\na"),
            ],
        ),
        (  # and its newer form
            {
                "messages": [
                    {"role": "system", "content": [{"type": "text", "value": "s"}], "loss_weight": 0.0},
                    {"role": "user", "content": [{"type": "text", "value": "q"}], "loss_weight": 0.0},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "reasoning", "value": "Hm."},
                            {"type": "tool_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                        ],
                        "loss_weight": 1.0,
                    },
                    {"role": "tool", "content": [{"type": "text", "value": '{"t": 1}'}]},
                    {"role": "assistant", "content": [{"type": "text", "value": "a"}], "loss_weight": 0.0},
                ]
            },
            [
                {**system("s"), "loss": False},
                {**user("q"), "loss": False},
                assistant("", reasoning_content="Hm.", tool_calls=[call("f", a=1)], loss=True),
                tool('{"t": 1}'),
                assistant("a", loss=False),
            ],
        ),
        (  # OpenAI's
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "q1"}, {"type": "text", "text": "q2"}]},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
                            {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                        ],
                    },
                    {"role": "tool", "tool_call_id": "1", "content": "one"},
                    {"role": "assistant", "content": "a", "loss": False},
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "b", "weight": 1},
                ]
            },
            [
                user("q1q2"),
                assistant("", tool_calls=[{**call("f", a=1), "id": "1"}, {**call("g"), "id": "2"}]),
                {**tool("one"), "tool_call_id": "1"},
                assistant("a", loss=False),
                user("q"),
                assistant("b", loss=True),
            ],
        ),
        ({"text": "plain"}, [{"role": "text", "content": "plain"}]),
    ],
)
def test_messages_by_hand(row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert read(row).messages == messages


def test_an_empty_system_message_is_none() -> None:
    for empty in ({"from": "system", "value": ""}, {"role": "developer", "content": None}):
        assert read({"conversations": [empty, TURN, ANSWER]}).messages == [user("q"), assistant("a")]
        assert read({"system": "s", "messages": [empty, TURN, ANSWER]}).messages[0] == system("s")
        with pytest.raises(RowError, match="'messages' is empty"):
            RowReader(RowFormat.messages, {}, answered=False).read({"system": "s", "messages": [empty]})
    with pytest.raises(RowError, match="the key 'text' is not read"):
        read({"conversations": [{"from": "system", "value": "", "text": "s"}, TURN, ANSWER]})


def test_results_of_tools_in_parts() -> None:
    for part, text in (
        ({"text": "22 C", "image_url": None}, "22 C!"),
        ({"value": "22 C", "text": None, "annotations": [], "extra": {}, "id": ""}, "22 C!"),
        ({"text": "", "image_url": None}, "!"),
        ({"text": "22 C", "unit": 0}, '[{"type": "text", "text": "22 C", "unit": 0}, {"type": "text", "text": "!"}]'),
        ({"unit": "C"}, '[{"type": "text", "unit": "C"}, {"type": "text", "text": "!"}]'),
    ):
        content = [{"type": "text", **part}, {"type": "text", "text": "!"}]
        messages = [user("q"), {"role": "tool", "content": content}, assistant("a")]
        assert read({"messages": messages}).messages[1] == tool(text)


def test_columns() -> None:
    assert read({"content": "c", "summary": "s"}, prompt="content", response="summary").messages == [
        user("c"),
        assistant("s"),
    ]
    row = {"dialog": [{"who": "human", "what": "q"}, {"who": "gpt", "what": "a"}]}
    found = read(row, conversations="dialog", **{"from": "who", "value": "what"})
    assert found.messages == [user("q"), assistant("a")]
    assert RowReader(RowFormat.prompt_response, {"prompt": "q"}).unused({"q": 1, "prompt": 2, "id": 3}) == [
        "prompt",
        "id",
    ]


@pytest.mark.parametrize(
    "tools",
    [[WEATHER], json.dumps([WEATHER]), [{"type": "function", "function": WEATHER}], [json.dumps(WEATHER)]],
)
def test_tools(tools: Any) -> None:
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "tools": tools}
    assert read(row).tools == [{"type": "function", "function": WEATHER}]
    for none in (None, "", [], "[]"):
        assert read({**row, "tools": none}).tools is None


@pytest.mark.parametrize("text", ["", "Be brief."])
def test_tools_in_the_system_message_as_glm_4_has_them(text: str) -> None:
    """The format of the GLM-4 repository's finetune/README."""
    system = {"role": "system", "content": text, "tools": [WEATHER]}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    conversation = read({"messages": [system, *turns]})
    assert conversation.tools == [{"type": "function", "function": WEATHER}]
    assert [message["content"] for message in conversation.messages] == [*([text] if text else []), "q", "a"]


TURN = {"from": "human", "value": "q"}
ANSWER = {"from": "gpt", "value": "a"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": []}, "'conversations' is empty. Fill it in or remove the row"),
        ({"messages": "[]"}, "'messages' is empty. Fill it in or remove the row"),
        (
            {"conversations": "x"},
            "'conversations' is a text, not a list such as "
            '[{"role": "user", "content": "…"}, …]. Correct or remove the row',
        ),
        ({"conversations": [TURN]}, "'conversations' holds no answer of the assistant. Correct or remove the row"),
        ({"messages": [TURN, 3]}, "message 2 of 'messages': it is 3, not an object. Correct or remove the row"),
        (
            {"conversations": [{"from": "narrator", "value": "x"}, ANSWER]},
            "message 1 of 'conversations': unknown role 'narrator'; expected one of system, user, assistant, "
            "function_call, tool, or another of docs/data.md",
        ),
        (
            {"conversations": [TURN, {"from": "gpt", "value": ""}]},
            "message 2 of 'conversations': 'value' is empty. Fill it in or remove the row",
        ),
        (
            {"conversations": [TURN, {"from": "function_call", "value": "weather()"}, ANSWER]},
            "message 2 of 'conversations': a call of a tool must look like "
            '{"name": …, "arguments": {…}}, and this is a text',
        ),
        (
            {"conversations": [TURN, ANSWER, {"from": "function_call", "value": "[]"}]},
            "message 3 of 'conversations': 'value' is empty. Fill it in or remove the row",
        ),
        (
            {"conversations": [TURN, {"from": "function_call", "value": '{"name": "f", "arguments": 3}'}, ANSWER]},
            "message 2 of 'conversations': the arguments of 'f' are 3, not an object",
        ),
        (
            {"messages": [TURN, {**ANSWER, "loss": "yes"}]},
            "message 2 of 'messages': 'loss' is a text, neither true nor false",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
            "message 1 of 'messages': 'content' holds something that is no text: only text can be trained on",
        ),
        (
            {"system": "s", "conversations": [{"from": "system", "value": "t"}, TURN, ANSWER]},
            "the row has a system message twice: under 'system' and in the list. Remove one",
        ),
        (
            {"tools": [{"name": "f"}], "conversations": [{"from": "system", "tools": [{}]}, TURN, ANSWER]},
            "the row has tools twice: under 'tools' and in its system message. Remove one",
        ),
        (
            {"messages": [TURN, {**ANSWER, "loss_weight": 0.5}]},
            "message 2 of 'messages': 'loss_weight' is 0.5, neither true nor false",
        ),
        (
            {"messages": [TURN, {**ANSWER, "loss": True, "weight": 0}]},
            "message 2 of 'messages': 'loss', 'weight' contradict each other",
        ),
        (
            {"messages": [TURN, {**ANSWER, "reasoning": "a", "reasoning_content": "b"}]},
            "message 2 of 'messages': 'reasoning_content', 'reasoning' contradict each other",
        ),
        (
            {"messages": [TURN, {**ANSWER, "thinking": {"a": 1}}]},
            "message 2 of 'messages': 'thinking' is an object, not a text. Correct or remove the row",
        ),
        (
            {"conversation": [{"human": "q", "answer": "a"}]},
            "message 1 of 'conversation': no key 'assistant'; the row has 'human', 'answer'. "
            "Add it, remove the row, or map another key: data.columns={assistant:NAME}",
        ),
        ({"prompt": "p", "response": "r", "tools": "x"}, "'tools' is a text, not a list of tools"),
        ({"prompt": "p", "response": "r", "tools": [3]}, "'tools' holds 3, which is no tool"),
    ],
)
def test_what_is_wrong(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as error:
        read(row)
    assert str(error.value) == reason


CHAT = [
    system("s"),
    user("1"),
    assistant("a"),
    user("2"),
    assistant("b", loss=False),
    user("3"),
    assistant("c"),
    user("4"),
]


def test_turns() -> None:
    before, parts = turns(CHAT)
    assert before == CHAT[:1]
    assert parts == [CHAT[1:3], CHAT[3:5], CHAT[5:7], CHAT[7:]]
    greeting = [
        assistant("hi"),
        user("1"),
        user("more"),
        assistant("", tool_calls=[call("f")]),
        tool("x"),
        assistant("a"),
    ]
    assert turns(greeting) == ([], [greeting[:1], greeting[1:]])
    assert turns([]) == ([], [])


@pytest.mark.parametrize(
    ("train_on", "flags"),
    [
        (TrainOn.auto, [None, None, None, None, False, None, None]),
        (TrainOn.all, [False, False, True, False, False, False, True]),
        (TrainOn.last, [False, False, False, False, False, False, True]),
        (TrainOn.marked, [False] * 7),
    ],
)
def test_what_is_trained(train_on: TrainOn, flags: list[bool | None]) -> None:
    (found,) = mark_trained(Conversation(CHAT), train_on, only_last=False)
    assert [message.get("loss") for message in found.messages] == flags  # the question without an answer is gone


@pytest.mark.parametrize(
    ("train_on", "ends"), [(TrainOn.auto, [7]), (TrainOn.all, [3, 7]), (TrainOn.last, [7]), (TrainOn.marked, [])]
)
def test_formats_that_train_the_last_answer_only(train_on: TrainOn, ends: list[int]) -> None:
    found = list(mark_trained(Conversation(CHAT), train_on, only_last=True))
    assert [len(conversation.messages) for conversation in found] == ends
    assert all("loss" not in message for conversation in found for message in conversation.messages)


@pytest.mark.parametrize("key", ["loss", "weight", "train", "training", "trainable", "masked"])
@pytest.mark.parametrize("speaker", ["role", "from"])
def test_flags_on_messages_say_what_is_trained(key: str, speaker: str) -> None:
    trained, untrained = (False, True) if key == "masked" else (True, False)
    said, names = "content" if speaker == "role" else "value", ("user", "assistant")
    flags = (None, trained, None, int(untrained), None, None)
    row = {
        "messages": [
            {speaker: names[number % 2], said: str(number), **({} if flag is None else {key: flag})}
            for number, flag in enumerate(flags)
        ]
    }
    assert [m.get("loss") for m in read(row).messages] == [None, True, None, False, None, None]
    (marked,) = mark_trained(read(row), TrainOn.all, only_last=False)
    assert [m["loss"] for m in marked.messages] == [False, True, False, False, False, True]


def test_a_flag_of_another_name_is_an_error_until_it_is_named() -> None:
    for value in (False, 0, 1.0):
        row = {"messages": [user("q"), {**assistant("a"), "learn": value}]}
        with pytest.raises(RowError, match=r"^message 2 of 'messages': the key 'learn' .*: \{loss: learn\}`"):
            read(row)
        assert read(row, loss="learn").messages[1]["loss"] is bool(value)
    reader = RowReader(RowFormat.messages, {})
    reader.read({"messages": [{**user("q"), "learn": False}, {**assistant("a"), "rank": 0, "learn": None}]})
    assert reader.skipped == {"learn": 2, "rank": 1}, "a user's message is not trained anyway"
    pairs = {"conversation": [{"human": "q", "assistant": "a", "train": False}, {"human": "r", "assistant": "b"}]}
    assert [message.get("loss") for message in read(pairs).messages] == [None, False, None, None]


def test_prompt_and_completion_as_trl_has_them() -> None:
    asked, answered = [system("s"), user("q")], [assistant("a")]
    assert read({"prompt": "q", "completion": "a"}).messages == [user("q"), *answered]
    for row in (
        {"prompt": asked, "completion": answered},
        {"prompt": json.dumps(asked), "completion": answered[0]},
        {"prompt": asked, "response": "a"},
    ):
        assert read(row).messages == [*asked, *answered]
        assert RowReader(RowFormat.prompt_response, {}).unused({**row, "id": 1}) == ["id"]
    with pytest.raises(RowError, match="no key 'response'"):
        read({"prompt": "q", "answer": "a"})
    with pytest.raises(RowError, match="'completion' is empty"):
        read({"prompt": "q", "completion": ""})


def test_images_are_an_error() -> None:
    for key, value in (("images", ["a.png"]), ("image", "a.png"), ("videos", ["b.mp4"]), ("audios", [{"path": "c"}])):
        for row in ({"prompt": "<image>q", "response": "a"}, {"messages": [user("<image>q"), assistant("a")]}):
            with pytest.raises(RowError, match=f"'{key}' is not empty, and images"):
                read({**row, key: value})
            for nothing in ([], None, ""):
                assert len(read({**row, key: nothing}).messages) == 2
    assert read({"image": "q", "response": "a"}, prompt="image").messages[0] == user("q")


SHARED = Path(os.environ.get("TOOLKIT_REAL_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.mark.skipif(not SHARED.is_dir(), reason="no folder with real data sets (TOOLKIT_REAL_DATA)")
def test_real_files() -> None:
    for name, row_format, columns, unusable in (
        ("alpaca_zh_demo.json", RowFormat.instruction, {}, 0),
        ("sharegpt_toolcall_zh.json", RowFormat.sharegpt, {}, 0),
        ("spo_train.jsonl", RowFormat.instruction, {}, 22),
        ("adgen_sample.jsonl", RowFormat.prompt_response, {"prompt": "content", "response": "summary"}, 0),
    ):
        text = (SHARED / name).read_text(encoding="utf-8")
        rows = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
        assert detect_format(rows[0], columns) is row_format
        reader, found, refused = RowReader(row_format, columns), [], []
        for row in rows:
            try:
                found.append(reader.read(row))
            except RowError as error:
                refused.append(str(error))
        assert len(refused) == unusable, (name, refused)
        assert set(refused) <= {"'output' is empty. Fill it in or remove the row"}
        assert all(conversation.messages[-1]["role"] == "assistant" for conversation in found), name
        if row_format is RowFormat.sharegpt:
            messages = [message for conversation in found for message in conversation.messages]
            assert sum(bool(message.get("tool_calls")) for message in messages) == 216
            assert sum(message["role"] == "tool" for message in messages) == 218
            assert any(conversation.tools for conversation in found)
    for name, usable, refusal in (
        ("dpo_zh_demo.json", 0, "preference data ('chosen', 'rejected')"),
        ("kto_en_demo.json", 150, "preference data: 'label' is false"),
        ("reason_tool_use_demo_50.jsonl", 50, ""),
    ):
        text = (SHARED / name).read_text(encoding="utf-8")
        rows = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
        reader, found, refused = RowReader(RowFormat.messages, {}), [], []
        for row in rows:
            try:
                found.append(reader.read(row))
            except RowError as error:
                refused.append(str(error))
        assert len(found) == usable
        assert all(refusal and reason.startswith(refusal) for reason in refused)
    messages = [message for conversation in found for message in conversation.messages]
    assert sum(len(message.get("tool_calls", [])) for message in messages) == 68
    assert sum("reasoning_content" in message for message in messages) == 112
    assert not reader.skipped


def test_columns_are_blamed_for_a_name_that_no_row_has() -> None:
    reader = RowReader(RowFormat.prompt_response, {"response": "answr"})
    with pytest.raises(RowError, match=r"^`columns` reads response from 'answr', but the row has 'prompt', 'answer'"):
        reader.read({"prompt": "a", "answer": "b"})
    listed = RowReader(RowFormat.messages, {"role": "who"})
    with pytest.raises(RowError, match=r"^message 1 of 'messages': `columns` reads role from 'who'"):
        listed.read({"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(RowError, match=r"^`columns` names 'q', but the row has 'prompt'"):
        detect_format({"prompt": "a"}, {"messages": "q", "text": "q", "prompt": "q"})


def test_openais_developer_is_a_system_message() -> None:
    row = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            *({"role": r, "content": "x"} for r in ("user", "assistant")),
        ]
    }
    assert RowReader(RowFormat.messages, {}).read(row).messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("thoughts", "because"),
        ("function_call", {"name": "f", "arguments": "{}"}),
        ("images", ["a.png"]),
        ("tools", [WEATHER]),
    ],
)
def test_text_of_a_message_does_not_vanish(key: str, value: Any) -> None:
    row = {"messages": [user("q"), {**assistant("a"), key: value}]}
    with pytest.raises(RowError) as caught:
        read(row)
    text = f"message 2 of 'messages': the key '{key}' is not read, and what it holds would be lost. Write it into the"
    assert str(caught.value).startswith(text)
    for unread, number, listed in (
        ("tool_calls", 1, [{**user("q"), "tool_calls": [call("f")]}, assistant("a")]),
        ("reasoning_content", 1, [{**user("q"), "reasoning_content": "because"}, assistant("a")]),
        ("why", 2, [user("q"), assistant("a", tool_calls=[{**call("f"), "why": "because"}])]),
        ("why", 2, [user("q"), assistant("", tool_calls=[{"name": "f", "arguments": {}, "why": "because"}])]),
        ("image", 1, [{**user("q"), "content": [{"type": "text", "text": "q", "image": "a.png"}]}, assistant("a")]),
    ):
        with pytest.raises(RowError, match=f"message {number} of 'messages': the key '{unread}' is not read"):
            read({"messages": listed})


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept(key: str) -> None:
    row = {"messages": [user("q"), {**assistant("a"), key: "because"}]}
    assert read(row).messages[1] == assistant("a", reasoning_content="because")
    row["messages"][1] |= {"reasoning_content": "because", key: "because"}
    assert read(row).messages[1] == assistant("a", reasoning_content="because")
    assert read({"messages": [user("q"), {**assistant("a"), key: " "}]}).messages[1] == assistant("a")


def test_preference_data_is_named() -> None:
    talk = {"messages": [user("q"), assistant("a")]}
    for row in (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"conversations": [TURN], "chosen": ANSWER, "rejected": ANSWER},
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        {**talk, "rejected_response": "b"},
    ):
        with pytest.raises(RowError, match=r"^preference data \('(chosen|rejected_response)'"):
            detect_format(row, {})
    with pytest.raises(RowError, match=r"^preference data"):
        RowReader(RowFormat.messages, {}).read({**talk, "rejected_response": "b"})
    for key, bad in (("label", False), ("kto_tag", False), ("kto_tag", "false")):
        with pytest.raises(RowError, match=f"^preference data: '{key}' is false, which marks a bad answer"):
            read({**talk, key: bad})
    for good in ({"label": True, "rejected": None}, {"kto_tag": "true"}, {"label": 0}, {"label": "False"}):
        assert read({**talk, **good}).messages == talk["messages"]
    better = read({"prompt": "q", "chosen": "a", "rejected": "b"}, response="chosen")
    assert better.messages == [user("q"), assistant("a")]
    listed = read({"chosen": [user("q"), assistant("a")], "rejected": []}, messages="chosen")
    assert listed.messages == [user("q"), assistant("a")]


def test_metadata_of_messages_is_counted() -> None:
    reader = RowReader(RowFormat.sharegpt, {})
    said = {"from": "human", "value": "q", "id": "x1", "markdown": None, "text": "q", "reasoning_content": "  "}
    answer = {"from": "gpt", "value": "a", "weight": 1, "id": 7, "tool_calls": None, "metadata": "", "edited": False}
    row = {"conversations": [said, answer]}
    assert reader.read(row).messages == [user("q"), assistant("a", loss=True, metadata="")]
    reader.read(row)
    assert reader.skipped == {"id": 4, "markdown": 2, "text": 2, "reasoning_content": 2, "edited": 2}
    glm3 = {"role": "tool", "name": "track", "parameters": {"a": 1}, "observation": "o"}
    reader.read({"conversations": [user("q"), glm3, assistant("a")]})
    assert sum(reader.skipped.values()) == 12, "all keys of a call with its result are read"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": None, "response": "b"}, "'prompt' 是 null，不是文本。请改正或删除该行"),
        ({"prompt": 5, "response": "b"}, "'prompt' 是 5，不是文本。请改正或删除该行"),
        ({"prompt": "a", "answer": "b"}, "没有键 'response'；这一行有 'prompt'、'answer'。"),
        (
            {"messages": [{"role": "x", "content": "a"}]},
            "'messages' 的第 1 条消息：未知的角色 'x'；应为 system、user、assistant",
        ),
    ],
)
def test_what_is_wrong_in_chinese(row: dict[str, Any], reason: str) -> None:
    set_language("zh")
    with pytest.raises(RowError) as error:
        read(row)
    assert str(error.value).startswith(reason)
