"""The live page: its events, and the page itself in Chromium (``pytest -m browser``)."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from actorpp.config import EngineConfig
from actorpp.serving.gateway import Gateway
from tests.exactness.tiny import save_llama
from tests.support.chromium import Page, browser
from tests.unit.engine.support import served
from tests.unit.serving.fakes import FakeEngine, make_tokenizer
from tests.unit.serving.http.support import client_of, serving


def test_its_events_tell_of_steps_rates_and_first_tokens_once(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        async with client_of(gateway) as client, client.stream("GET", "/live/events") as response:
            lines = response.aiter_lines()

            async def event() -> tuple[str, dict[str, Any]]:
                name, data, _ = [await anext(lines) for _ in range(3)]
                return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

            name, about = await event()
            assert (name, about["model"], about["chat"]) == ("about", "tiny", True)
            assert [stage["layers"] for stage in about["stages"]] == [[0, 2], [2, 5]]
            assert (await event())[1]["steps"] == []
            fields = {"prompt": list(range(5, 45)), "max_tokens": 4, "ignore_eos": True, "temperature": 0}
            await client.post("/v1/completions", json=fields)
            seen: list[list[Any]] = []
            first_tokens: list[Any] = []
            while sum(step[1] + step[2] for step in seen) < 43:
                snapshot = (await event())[1]
                seen += snapshot["steps"]
                first_tokens += snapshot["first_tokens"]
            assert [step[0] for step in seen] == sorted({step[0] for step in seen})
            assert sum(step[1] for step in seen) == 40
            assert snapshot["state"] == "ready"
            assert snapshot["stages"] == [{"queue": 0, "restarts": 0}] * 2
            assert [step[4] for step in seen] == [True] + [False] * (len(seen) - 1)  # it had rested before the first
            for _, _, _, spans, _ in seen:
                assert len(spans) == 2
                assert all(start <= end <= snapshot["now"] for start, end in spans)
            assert len(first_tokens) == 1

    served(model, body)


def test_a_browser_may_give_the_key_as_a_password(model: Path) -> None:
    async def body(gateway: Gateway) -> None:
        async with client_of(gateway, api_key="k:k") as client:
            response = await client.get("/")
            assert (response.status_code, response.headers["WWW-Authenticate"][:5]) == (401, "Basic")
            basic = base64.b64encode(b"me:k:k").decode()
            response = await client.get("/", headers={"Authorization": f"Basic {basic}"})
            assert response.status_code == 200
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
            for file in ("live.css", "live.js", "gantt.js", "charts.js"):
                path = f"/live/{file}"
                assert (await client.get(path)).status_code == 401
                assert (await client.get(path, headers={"Authorization": f"Basic {basic}"})).status_code == 200
            for bad in ("Basic !", "Basic " + base64.b64encode(b"k").decode()):
                assert (await client.get("/", headers={"Authorization": bad})).status_code == 401

    served(model, body)


@pytest.mark.browser
def test_in_chromium(tmp_path: Path) -> None:
    """No console errors, a request sent on the page appears on it, the Gantt moves; phone, dark, keyboard."""
    pictures = Path(os.environ["ACTORPP_SCREENSHOTS"]) if "ACTORPP_SCREENSHOTS" in os.environ else None

    def see(url: str, loop: asyncio.AbstractEventLoop) -> None:
        with browser(tmp_path / "profile") as page:
            page.size(1280, 900)
            page.scheme("light")
            page.open(url)
            page.until("document.querySelectorAll('.stage').length == 8")
            page.until("document.getElementById('status').textContent.startsWith('up')")
            page.press("Tab")
            assert page.value("document.activeElement.className") == "skip"
            page.press("Enter")
            page.press("Tab")
            page.value("document.getElementById('prompt').focus()")
            page.value("document.getElementById('tokens').value = 200")
            page.type("the cat")
            page.press("Enter", control=True)
            page.until("document.getElementById('running').textContent == '1'")
            page.until("document.getElementById('answer').textContent.length > 20")
            page.until("/TTFT .* tokens/.test(document.getElementById('figures').textContent)")
            page.until("document.getElementById('finished').textContent.startsWith('1 ')")
            assert page.value("document.querySelector('.queue').textContent") == "0"
            asyncio.run_coroutine_threadsafe(many(url), loop).result()
            page.until("/[1-9]/.test(document.getElementById('prefill-rate').textContent)")
            assert coloured(page, "gantt") > 100
            before = page.value("document.getElementById('gantt').toDataURL()")
            page.until(f"document.getElementById('gantt').toDataURL() != {json.dumps(before)}")
            if pictures is not None:
                page.screenshot(pictures / "light.png")
            light = page.value("getComputedStyle(document.body).backgroundColor")
            page.scheme("dark")
            page.until(f"getComputedStyle(document.body).backgroundColor != {json.dumps(light)}")
            page.until("true")
            if pictures is not None:
                page.screenshot(pictures / "dark.png")
            page.scheme("light")
            page.size(390, 844)
            page.until("innerWidth == 390")
            assert page.value("document.documentElement.scrollWidth") <= 390
            page.until("document.getElementById('gantt').width <= 2 * 390")
            if pictures is not None:
                page.screenshot(pictures / "phone-light.png")
                page.scheme("dark")
                page.until(f"getComputedStyle(document.body).backgroundColor != {json.dumps(light)}")
                page.screenshot(pictures / "phone-dark.png")
            assert page.errors == []

    async def many(url: str) -> None:
        prompts = [[(n * m) % 300 + 5 for n in range(1, 900)] for m in range(3, 9)]
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for batch in (prompts[:2], prompts):
                fields = {"prompt": batch, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
                assert (await client.post("/v1/completions", json=fields)).status_code == 200

    async def body(gateway: Gateway) -> None:
        async with serving(gateway) as url:
            await asyncio.to_thread(see, url, asyncio.get_running_loop())

    model = save_llama(tmp_path / "model", tied=True, eos_token_id=2, layers=8)
    make_tokenizer(model)
    served(model, body, stages=8, kv_tokens=16384, chunked_prefill_size=64)


@pytest.mark.browser
def test_a_server_that_recovers_says_so(tmp_path: Path) -> None:
    pictures = Path(os.environ["ACTORPP_SCREENSHOTS"]) if "ACTORPP_SCREENSHOTS" in os.environ else None

    def see(url: str, engine: FakeEngine) -> None:
        with browser(tmp_path / "profile") as page:
            page.size(1280, 900)
            page.open(url)
            page.until("document.getElementById('status').textContent.startsWith('recovering')")
            page.until("document.querySelector('.stage .restarts').textContent == '2'")
            if pictures is not None:
                page.screenshot(pictures / "recovering.png")
            engine.state = "ready"
            page.until("document.getElementById('status').textContent.startsWith('up')")
            engine.stalled_s = 100.0
            page.until("document.getElementById('status').textContent == 'no step for 1 min 40 s'")
            assert page.errors == []

    async def main() -> None:
        engine = FakeEngine(EngineConfig(), state="recovering", restarts=2)
        async with engine, Gateway(engine, "fake") as gateway, serving(gateway) as url:
            await asyncio.to_thread(see, url, engine)

    asyncio.run(main())


def coloured(page: Page, canvas: str) -> int:
    """Pixels of the colour of prefills."""
    return int(
        page.value(
            f"""(() => {{
              const canvas = document.getElementById({canvas!r});
              const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
              let found = 0;
              for (let i = 0; i < data.length; i += 4)
                if (data[i] == 0x32 && data[i + 1] == 0x66 && data[i + 2] == 0xd6) found++;
              return found;
            }})()"""
        )
    )
