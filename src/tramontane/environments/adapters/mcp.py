"""Tools of an MCP server, through its official client: `mcp:COMMAND` over stdio, in the folder and
with the variables of the run, or `mcp:http://localhost:8000/mcp` over streamable HTTP.

The tools are listed once in each process. A conversation has a server of its own, or at an address
a session of its own, from its first call to its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import IO, Any

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import INVALID_PARAMS, METHOD_NOT_FOUND, CallToolResult, TextContent
from pydantic import ValidationError

from tramontane.config import Config
from tramontane.environments.arguments import fault_of, inlined
from tramontane.environments.tools import Described, Misuse
from tramontane.errors import InputError

LIST_SECONDS = 60.0  # limit of a server's start and its list of tools, before a run
_ADDRESSES = ("http://", "https://")
_ERROR_CHARACTERS = 300  # of the end of what a server wrote to standard error
_DECODED = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/bmp", "image/gif")
_MISUSED = (INVALID_PARAMS, METHOD_NOT_FOUND)


class MCP:
    """A toolbox with the tools of a server.

    What a server answers as an error is answered to the model, and the conversation continues; a
    server that ends or breaks the protocol is a failure.
    """

    name = ""

    @classmethod
    def check(cls, name: str) -> None:
        """List the server's tools.

        Raises:
            InputError: it does not start or answer, or has no tools.
        """
        if not _listed(name):
            raise InputError("the server has no tools")

    @classmethod
    def descriptions(cls) -> tuple[Described, ...]:
        """The server's tools."""
        return _listed(cls.name)

    def __init__(self) -> None:
        self._ends = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._model = ""

    def start(self, config: Config) -> None:
        """Note the model that reads the answers."""
        self._model = config.model

    async def _begun(self) -> Client:
        """The client of this conversation."""
        if self._task is not None:
            return await self._client
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        # The client must be closed by the task that opened it.
        self._task = asyncio.create_task(self._connect())
        both: list[asyncio.Future[Any]] = [self._task, self._client]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        return await self._client

    async def _connect(self) -> None:
        async with _connected(self.name) as client:
            self._client.set_result(client)
            await self._ends.wait()

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of a tool.

        Raises:
            Misuse: the server says that it cannot be had.
            MCPError: the server has ended, or broken the protocol.
        """
        try:
            result = await (await self._begun()).call_tool(name, arguments)
        except MCPError as error:
            if error.code in _MISUSED:
                raise Misuse(error.message) from None
            raise
        except ValidationError as error:
            raise RuntimeError(f"the server's answer is not a result: {error}") from None
        text = _text_of(result)
        if result.is_error:
            withheld = text in ("", f"Error executing tool {name}")
            raise Misuse(f"{text} (the server withholds why)".strip() if withheld else text)
        images = [_image(part) for part in result.content]
        if not any(images) or not await asyncio.to_thread(_sees, self._model):
            return text
        shown = [image or _part(part) for image, part in zip(images, result.content, strict=True)]
        return [part for each in shown for part in (each, "\n")][:-1]

    async def close(self) -> None:
        self._ends.set()
        if self._task is not None:
            await self._task


@asynccontextmanager
async def _connected(name: str) -> AsyncIterator[Client]:
    """A client of a server; what the server said last is added to the errors of its start."""
    if name.startswith(_ADDRESSES):
        async with Client(name) as client:
            yield client
        return
    command, *arguments = shlex.split(name)
    server = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
    with tempfile.TemporaryFile("w+") as errors:
        started = False
        try:
            async with Client(stdio_client(server, errors)) as client:
                started = True
                yield client
        except Exception as error:
            if started:
                raise
            raise RuntimeError(f"{_cause(error)}{_end_of(errors)}") from error


def _cause(error: BaseException) -> str:
    """The type and text of an exception, of the first in a group of them."""
    while parts := getattr(error, "exceptions", ()):
        error = parts[0]
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return f"it takes more than {LIST_SECONDS:.0f} s to start and list its tools"
    return f"{type(error).__name__}: {error}"


def _end_of(errors: IO[str]) -> str:
    errors.seek(0)
    said = errors.read().strip()[-_ERROR_CHARACTERS:]
    return f"; it wrote: {said}" if said else ""


@lru_cache
def _listed(name: str) -> tuple[Described, ...]:
    async def tools() -> list[Any]:
        found: list[Any] = []
        async with _connected(name) as client:
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                if (cursor := page.next_cursor) is None:
                    return found

    with ThreadPoolExecutor(1, "mcp") as thread:  # this one may have an event loop
        try:
            waited = asyncio.wait_for(tools(), LIST_SECONDS)
            found = thread.submit(asyncio.run, waited).result()
        except Exception as error:  # a server may be anything
            raise InputError(f"the MCP server does not answer: {_cause(error)}") from None
    names = [tool.name for tool in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"the server has two tools named {twice[0]!r}")
    return tuple(map(_described, found))


def _described(tool: Any) -> Described:
    schema = {"type": "object", "properties": {}, **inlined(tool.input_schema)}
    if fault := fault_of(schema):
        raise InputError(f"the schema of the server's tool {tool.name!r}: {fault}")
    function = {
        "name": tool.name,
        "description": tool.description or tool.title or tool.name,
        "parameters": schema,
    }
    return Described({"type": "function", "function": function})


def _text_of(result: CallToolResult) -> str:
    parts = [_part(part) for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _image(part: Any) -> dict[str, str] | None:
    """An image of a kind that is decoded, alone or in a resource, as a part of a content."""
    kind = str(getattr(found := getattr(part, "resource", part), "mime_type", None)).lower()
    data = getattr(found, "blob", None) or getattr(found, "data", None)
    known = kind.partition(";")[0].rstrip() in _DECODED
    return {"type": "image", "base64": str(data)} if data and known else None


@lru_cache
def _sees(model: str) -> bool:
    """True if a model takes images. torch is imported for that, with the first image."""
    from tramontane.models.image_tokens import ImageProcessor

    try:
        return bool(ImageProcessor(model).parent)
    except InputError:
        return False


def _part(part: Any) -> str:
    """A part of a result as text: an image or a sound by its kind alone, which is what a model of
    text reads."""
    if isinstance(part, TextContent):
        return part.text
    resource = getattr(part, "resource", part)
    if text := getattr(resource, "text", None):
        return str(text)
    if uri := getattr(resource, "uri", None):
        return f"[{uri}]"
    return f"[{part.type} {part.mime_type}]"
