"""Tools of MCP servers: a real one, over stdio and at an address."""

import asyncio
import base64
import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

if not hasattr(pytest.importorskip("mcp", reason="needs tramontane-rl[mcp]"), "Client"):
    pytest.skip("needs tramontane-rl[mcp]", allow_module_level=True)  # an older one

from tramontane.config import Config, DataConfig
from tramontane.environments import loading
from tramontane.environments.adapters import mcp
from tramontane.environments.calls import Parsed
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.environments.session import Session
from tramontane.errors import InputError
from tramontane.models.images import decode
from tramontane.types import PLACE, Problem, ToolCall

SERVER = f"{sys.executable} {Path(__file__).with_name('mcp_server.py')}"
ODD = SERVER.replace("mcp_server", "odd_mcp_server")
WAIT = 30.0  # for a server


@pytest.fixture
def address():
    """The address of a server of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*SERVER.split(), str(port)], stderr=subprocess.DEVNULL)
    ends = time.monotonic() + WAIT
    while time.monotonic() < ends:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp", process
    process.kill()
    process.wait(WAIT)


def data(path):
    return DataConfig(train="playground:", tools=(f"mcp:{path}",))


async def conversation(path, *turns, limit=WAIT, model="tiny"):
    """The answers to turns of calls, each (name, arguments), in a conversation of its own."""
    session = Session(data(path), 2000, Runner())
    try:
        await session.start(Problem("p", "math", "?"), 0, Config(model=model))
        for turn in turns:
            calls = [ToolCall(name, arguments, "") for name, arguments in turn]
            message = Parsed("", "", "", calls)
            reply = await asyncio.wait_for(session.step(message), limit)
            yield [found["content"] for found in reply.messages], [call.error for call in calls]
    finally:
        await asyncio.wait_for(session.close(), WAIT)


def answers(path, *turns, **limits):
    async def all_of():
        return [found async for found in conversation(path, *turns, **limits)]

    return asyncio.run(all_of())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stdio", "address"])
def test_tools_of_a_server_are_called(kind, request):
    path = SERVER if kind == "stdio" else request.getfixturevalue("address")[0]
    loading.check(data(path))
    described = {
        tool["function"]["name"]: tool["function"] for tool in loading.described(data(path))
    }
    assert [*described] == ["add", "put", "look", "fail"]
    assert described["add"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
        "required": ["a"],
    }
    found = answers(
        path,
        [("add", {"a": "2", "b": 3}), ("put", {"key": "x", "value": [1]})],
        [("put", {"key": "y", "value": "[2]"}), ("put", {"key": "z", "value": [3]})],
        [("add", {"a": "two"}), ("add", {"c": 1}), ("sub", {})],
        [("fail", {"kind": "told"}), ("fail", {"kind": "disk"}), ("add", {"a": 1})],
    )
    assert found[0][0][0] == "5" and '"x"' in found[0][0][1] and not any(found[0][1])
    assert '"z"' not in found[1][0][0] and '"y"' in found[1][0][1]  # in order, in one session
    assert found[2][0] == [
        "error: argument 'a' of add: 'two' is not of type 'integer'",
        "error: add has no argument 'c'; it takes: a, b",
        "error: there is no tool 'sub'; the tools are: add, put, look, fail",
    ]
    assert found[3][0] == [
        "error: Error executing tool fail: use it otherwise",
        "error: Error executing tool fail (the server withholds why)",
        "2",
    ]


# What a model that sees reads of an answer with images (*: an image), and one that does not.
LOOKS = {
    "both": ("Left:\n*\nright:\n*", "Left:\n[image image/png]\nright:\n[image image/png]"),
    "resource": ("Held:\n*", "Held:\n[file:///a.png]"),
    "drawing": ("Drawn:\n[image image/svg+xml]",) * 2,
}


@pytest.mark.slow
def test_images_of_a_server_are_shown_to_models_that_see():
    async def messages(model):
        session = Session(data(SERVER), 2000, Runner())
        try:
            await session.start(Problem("p", "math", "?"), 0, Config(model=model))
            calls = [ToolCall("look", {"kind": kind}, "") for kind in LOOKS]
            return [(await session.step(Parsed("", "", "", [call]))).messages for call in calls]
        finally:
            await asyncio.wait_for(session.close(), WAIT)

    found = asyncio.run(messages("tiny_vision")), asyncio.run(messages("tiny"))
    for (kind, (text, told)), (seen,), (read,) in zip(LOOKS.items(), *found, strict=True):
        assert seen["content"].replace(PLACE, "*") == text, kind
        assert all(decode(image).size == (28, 28) for image in seen.get("images", ()))
        assert len(seen.get("images", ())) == text.count("*"), kind
        assert read == {"role": "tool", "content": told}, kind


@pytest.mark.slow
def test_a_broken_image_of_a_server_is_a_failure():
    with pytest.raises(
        EnvironmentFailed, match="the result of look.*an image: not an image of the formats"
    ):
        answers(SERVER, [("look", {"kind": "broken"})], model="tiny_vision")


@pytest.mark.slow
def test_each_conversation_has_a_server_of_its_own_and_ends_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MCP_STARTS", str(tmp_path / "starts"))
    path = f"{SERVER} "  # listed anew
    loading.check(data(path))

    async def both():
        one = conversation(path, [("put", {"key": "x", "value": [1]})], [("add", {"a": 1})])
        two = conversation(path, [("put", {"key": "y", "value": [2]})])
        first = await anext(one), await anext(two)
        return first, [found async for found in one], [found async for found in two]

    first, *_ = asyncio.run(both())
    assert '"x"' not in first[1][0][0]
    started = [int(line) for line in (tmp_path / "starts").read_text().split()]
    assert len(started) == 3  # for the list, and two conversations
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stdio", "address"])
def test_a_server_that_ends_is_a_failure_of_its_conversation(kind, request):
    path = SERVER if kind == "stdio" else request.getfixturevalue("address")[0]
    with pytest.raises(EnvironmentFailed, match="fail: "):
        answers(path, [("add", {"a": 1})], [("fail", {"kind": "end"})])
    if kind == "stdio":
        assert answers(path, [("add", {"a": 1})])[0][0] == ["2"]


@pytest.mark.slow
def test_a_call_that_hangs_is_given_up_and_its_server_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("MCP_STARTS", str(tmp_path / "starts"))
    began = time.monotonic()
    with pytest.raises(asyncio.TimeoutError):
        answers(SERVER, [("fail", {"kind": "hang"})], limit=1.0)
    assert time.monotonic() - began < WAIT
    [*pids] = (tmp_path / "starts").read_text().split()
    assert not os.path.exists(f"/proc/{pids[-1]}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        ("any", {"x": "5"}, '{"x": "5"}'),
        ("open", {"y": [1]}, '{"y": [1]}'),
        ("silent", {}, "error: (the server withholds why)"),
    ],
)
def test_what_a_server_leaves_open_is_passed_on(kind, arguments, said):
    assert answers(f"{ODD} {kind}", [("echo", arguments)])[0][0] == [said]


@pytest.mark.slow
def test_an_answer_that_is_no_result_is_a_failure():
    with pytest.raises(EnvironmentFailed, match="echo: RuntimeError: the server's answer is not"):
        answers(f"{ODD} broken", [("echo", {})])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (f"{ODD} type", "'echo': properties.x.type: 'int' is not valid"),
        (f"{ODD} pattern", r"'echo': properties.x.pattern: '\(' is not a 'regex'"),
        (f"{ODD} null", "'echo': properties: None is not of type 'object'"),
        (f"{ODD} twice", "two tools named 'echo'"),
        (f"{ODD} none", "the server has no tools"),
        ("no-such-command --x", "No such file or directory: 'no-such-command'"),
        (f"{SERVER} --broken", "it wrote: no configuration"),
        (f"{sys.executable} -c pass", "does not answer: (?!.*it wrote)"),
        (f"{ODD} unlisted", "does not answer: MCPError: unknown"),
        (f"{ODD} loud", "; it wrote: y{300}$"),
        ("http://127.0.0.1:9/mcp", "does not answer: ConnectError: "),
        ("https://127.0.0.1:9/mcp", "does not answer: ConnectError: "),
    ],
)
def test_a_server_that_does_not_start_is_refused_before_the_run(path, said):
    with pytest.raises(InputError, match=f"data.tools: mcp:.*{said}"):
        loading.check(data(path))


def test_a_server_that_does_not_answer_in_time_is_refused(monkeypatch):
    monkeypatch.setattr(mcp, "LIST_SECONDS", 0.1)
    with pytest.raises(InputError, match="does not answer: it takes more than 0 s to start and li"):
        loading.check(data(f"{ODD} mute"))


@pytest.mark.slow
def test_images_of_every_kind_that_is_decoded_are_shown():
    def part(kind, **content):
        written = io.BytesIO()
        Image.new("RGB", (28, 28)).save(written, kind.partition("/")[2].replace("jpg", "jpeg"))
        encoded = base64.b64encode(written.getvalue()).decode()
        return {"type": "image", "mimeType": kind, "data": encoded} | content

    kinds = [f"image/{kind}" for kind in ("png", "jpeg", "jpg", "webp", "bmp", "gif")]
    parts = [part(kind) for kind in kinds]
    parts += [part("image/png", mimeType="Image/PNG ;q=1;v=2"), part("image/png", data="")]
    parts += [part("image/png", type="audio", mimeType="audio/wav")]
    [found], [errors] = answers(
        f"{ODD} result", [("echo", {"content": parts})], model="tiny_vision"
    )[0]
    shown = [*[PLACE] * 7, "[image image/png]", "[audio audio/wav]"]
    assert found == "\n".join(shown) and not errors


def test_a_conversation_without_a_call_is_closed():
    tools = loading.load(f"mcp:{ODD} any", "data.tools")()
    asyncio.run(asyncio.wait_for(tools.close(), WAIT))


def test_the_calls_of_a_conversation_go_to_one_server():
    turns = [("echo", {})], [("echo", {}), ("echo", {})]
    assert [told for told, _ in answers(f"{ODD} count", *turns)] == [["1"], ["2", "3"]]


def test_a_server_that_does_not_start_again_is_a_failure(tmp_path):
    with pytest.raises(EnvironmentFailed, match="echo: RuntimeError: .*; it wrote: not again"):
        answers(f"{ODD} once {tmp_path / 'started'}", [("echo", {})], limit=5.0)


def test_all_pages_of_a_list_of_tools_are_read():
    tools = loading.described(data(f"{ODD} pages"))
    assert [tool["function"]["name"] for tool in tools] == ["echo1", "echo2", "echo3"]


def test_a_tool_is_described_by_what_it_has():
    empty = {"type": "object", "properties": {}}
    assert loading.described(data(f"{ODD} bare")) == [
        {
            "type": "function",
            "function": {"name": name, "description": said, "parameters": empty},
        }
        for name, said in (("a", "a"), ("b", "B"), ("c", "Do c."))
    ]


def test_parts_of_a_result_are_read_as_text():
    held = {"uri": "file:///a.txt", "mimeType": "text/plain"}
    parts = [
        {"type": "text", "text": "é"},
        {"type": "text", "text": ""},
        {"type": "resource", "resource": {**held, "text": "Held."}},
        {"type": "resource", "resource": {**held, "text": ""}},
        {"type": "resource", "resource": {**held, "blob": "AA=="}},
        {"type": "resource_link", "uri": "file:///b.txt", "name": "b"},
        {"type": "image", "data": "AA==", "mimeType": "image/heic"},
        {"type": "audio", "data": "AA==", "mimeType": "audio/wav"},
    ]
    read = "é\n\nHeld.\n[file:///a.txt]\n[file:///a.txt]\n[file:///b.txt]\n[image image/heic]"
    structure = {"structuredContent": {"é": [1]}}
    found = answers(
        f"{ODD} result",
        [("echo", {"content": parts})],
        [("echo", {"content": [], **structure})],
        [("echo", {"content": parts[:1], **structure})],
        [("echo", {"content": []})],
        [("echo", {"content": parts[:1], "isError": True})],
        [("echo", {"content": [], "isError": True, **structure})],
    )
    assert [told for [told], _ in found] == [
        f"{read}\n[audio audio/wav]", '{"é": [1]}', "é", "", "error: é", 'error: {"é": [1]}',
    ]  # fmt: skip


@pytest.mark.parametrize("code", [-32602, -32601])
def test_a_call_that_the_protocol_refuses_is_answered(code):
    assert answers(f"{ODD} refused", [("echo", {"code": code})])[0][0] == ["error: unknown"]


def test_another_error_of_the_protocol_is_a_failure():
    with pytest.raises(EnvironmentFailed, match="echo: MCPError: unknown"):
        answers(f"{ODD} refused", [("echo", {"code": -32603})])
