"""Debian's Chromium without a window, driven over a pipe by its own protocol: no driver, no port, no package."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CEILING_S = 60.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
         "--disable-background-networking", "--remote-debugging-pipe", "--hide-scrollbars")  # fmt: skip


class Page:
    """One page. Every method waits for its effect.

    Attributes:
        errors: What the console said of errors, and exceptions that nobody caught.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.errors: list[str] = []
        self._commands = commands
        self._answers = answers
        self._results: dict[int, Any] = {}
        self._news = threading.Condition()
        self._number = 0
        self._session: str | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The protocol's own methods."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        with self._news:
            if not self._news.wait_for(lambda: number in self._results, CEILING_S):
                raise AssertionError(f"no answer to {method}")
            answer = self._results.pop(number)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState == 'complete'")

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait for an expression to be true, asking at every frame."""
        end = time.monotonic() + CEILING_S
        while not self.value(f"new Promise(done => requestAnimationFrame(() => done(Boolean({expression}))))"):
            if time.monotonic() > end:
                raise AssertionError(f"never true: {expression}; errors: {self.errors}")

    def press(self, key: str, *, control: bool = False) -> None:
        """A key of the keyboard."""
        codes = {"Enter": 13, "Tab": 9}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 2 if control else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=False)

    def scheme(self, name: str) -> None:
        """``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, path: Path) -> None:
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(picture["data"]))

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._answers, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "assert"):
                self.errors.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(str(parameters["entry"]))
        if "id" in message:
            with self._news:
                self._results[message["id"]] = message
                self._news.notify_all()


@contextmanager
def browser(folder: Path, program: str = "chromium") -> Iterator[Page]:
    """A page of a browser of its own, whose profile is in ``folder``."""
    commands_in, commands = os.pipe()
    answers, answers_out = os.pipe()
    line = f'exec "$@" 3<&{commands_in} 4>&{answers_out}'
    process = subprocess.Popen(
        ["bash", "-c", line, "bash", program, *FLAGS, f"--user-data-dir={folder}"],
        pass_fds=(commands_in, answers_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands_in)
    os.close(answers_out)
    page = None
    try:
        page = Page(commands, answers)
        yield page
    finally:
        os.close(commands)  # the browser ends when its pipe does
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if page is not None:
            page._reader.join(10)
        os.close(answers)
