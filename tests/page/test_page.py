"""The page in a headless Chromium: chat, stop, edit, branch, keep, compare; keys; a server that dies."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys

from tests.e2e.engine_process import ADMIN_KEY, DEMO, EngineProcess
from tests.page.browser import Browser
from tests.page.hostile import OUTPUTS
from tests.paths import REPOSITORY
from tools.demo import VISION_MODEL

NARROW, HIGH = 360, 800
SHAPES = REPOSITORY / "tools" / "demo" / "vision" / "shapes.png"


def test_branched_chat_is_saved_and_found(page: Browser) -> None:
    page.say("What is 12 + 345?")
    assert page.answered() == ["12 + 345 = 357"]
    page.press("article.user", "Edit")
    page.find("talk").find_element("css selector", "textarea").send_keys(
        Keys.END, Keys.BACKSPACE, Keys.BACKSPACE, "6?", Keys.CONTROL, Keys.ENTER
    )
    page.until(lambda: "12 + 346 = 358" in page.texts("article.assistant .body"), "answer to the edited question")
    assert page.answered() == ["12 + 346 = 358"]
    page.press("article.user", "Previous branch")
    assert page.texts("article.assistant .body") == ["12 + 345 = 357"]
    page.press("article.assistant", "Regenerate")
    page.until(lambda: "2 of 2" in page.texts("article.assistant .actions span"), "second branch of the answer")
    assert page.answered() == ["12 + 345 = 357"]
    page.shoot("chat")
    page.driver.refresh()
    page.until(lambda: page.texts("#conversations .title"), "the list of conversations")
    page.find("find").send_keys("346")
    page.press("#conversations", "What is 12 + 345?")
    assert page.texts("article.assistant .body") == ["12 + 345 = 357"]
    page.find("find").send_keys("nowhere")
    assert page.texts("#conversations .title") == []


def test_answer_is_stopped_and_continued(page: Browser, engine: EngineProcess) -> None:
    page.script("document.querySelector('#settings details').open = true")
    page.set("min tokens", "1900")

    def is_stopped() -> bool:
        """Return False where the whole answer came before the worker was stopped."""
        page.click("new")
        page.say("What are you?")
        page.until(lambda: len("".join(page.texts("article.assistant .body"))) > 20, "the beginning of an answer")
        engine.kill("worker0", signal.SIGSTOP)
        is_under_way = engine.metric("num_requests_running") == 1
        if is_under_way:
            page.click("send")
        engine.kill("worker0", signal.SIGCONT)
        page.answered()
        return is_under_way

    page.until(is_stopped, "an answer stopped in time")
    (stopped,) = page.answered()
    assert page.texts("article.assistant .actions small") == ["stopped"]
    page.set("min tokens", "")
    page.set("max completion tokens", "8")
    page.press("article.assistant", "Continue")
    (gone_on,) = page.answered()
    shown, began = (text.replace("`", "") for text in (gone_on, stopped))  # inline code may have been open at the stop
    assert shown.startswith(began.rstrip())


def test_compared_settings_and_token_probabilities(page: Browser) -> None:
    page.set("compare two settings", "")
    page.press("#settings .tabs", "Right")
    page.set("max completion tokens", "3")
    page.say("What is 2 + 2?")
    page.until(lambda: len(page.all(".compared article.assistant .actions small")) == 2, "two answers")
    left, right = page.answered()
    assert (left, right) == ("2 + 2 = 4", left[: len(right)])
    page.shoot("compared")
    page.set("compare two settings", "")
    page.set("show token probabilities", "")
    page.say("What is 2 + 3?")
    page.until(lambda: page.all("article.assistant .tokens span"), "tokens")
    page.until(lambda: page.text("send") == "Send", "the whole answer")
    assert page.texts("article:last-child .tokens")[0] == "2 + 3 = 5■"
    titles = page.script("return [...document.querySelectorAll('article:last-child .tokens span')].map((one) => one.title)")
    assert all(len(title.split("\n")) == 6 for title in titles)


def test_structured_output_and_a_tool_result(page: Browser) -> None:
    kinds = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]}
    page.set("response format (JSON Schema)", json.dumps(kinds))
    page.say("Which color?")
    assert json.loads(page.answered()[0])["color"] in ("red", "blue")
    page.set("response format (JSON Schema)", "{")
    page.say("Which color?")
    page.until(lambda: any("invalid JSON" in text for text in page.texts(".error")), "error for invalid JSON")
    page.set("response format (JSON Schema)", "")
    function = {"name": "paint", "parameters": kinds | {"additionalProperties": False}}
    page.set("tools (JSON array)", json.dumps([{"type": "function", "function": function}]))
    page.set("tool choice", "required")
    page.say("Paint it.")
    page.until(lambda: page.texts(".call strong") == ["paint"] and page.text("send") == "Send", "a call")
    assert json.loads(page.texts(".call pre")[0])["color"] in ("red", "blue")
    page.set("tool choice", "none")
    page.all(".call textarea")[0].send_keys("it is painted")
    page.press(".call", "Submit result")
    page.until(lambda: page.texts("article.tool .body") == ["it is painted"], "the result")
    page.until(
        lambda: page.text("send") == "Send" and page.texts("article:last-child.assistant .actions small"), "an answer to it"
    )
    page.shoot("tool")


def test_error_message_of_server_is_shown(page: Browser) -> None:
    page.set("response format (JSON Schema)", json.dumps({"not": {}}))
    page.say("Which color?")
    page.until(lambda: page.all(".error"), "an error")
    assert "not" in page.texts(".error")[0]
    page.complaints()  # the browser logs the status


def test_text_model_takes_no_picture(page: Browser, tmp_path: Path) -> None:
    """The page refuses pictures before anything is sent and says why, however they are added."""
    file = tmp_path / "red.png"
    Image.new("RGB", (8, 8), (200, 30, 30)).save(file)
    page.until(lambda: page.find("attach").get_attribute("aria-disabled") == "true", "disabled attach button")
    assert page.find("attach").get_attribute("title") == "Attachments are not supported: tokamak-demo accepts text only"
    page.click("attach")
    page.find("file").send_keys(str(file))
    page.until(lambda: len(page.texts(".error")) == 2, "two errors")
    assert page.texts(".error") == ["tokamak-demo accepts text only", "red.png: tokamak-demo accepts text only"]
    assert not page.all("#files img")


HOSTILE_NAME = "<img src=x onerror=window.pwned=1>"


@pytest.fixture(scope="module")
def seeing() -> Iterator[EngineProcess]:
    with EngineProcess(VISION_MODEL, "--served-model-name", HOSTILE_NAME) as engine:
        yield engine


def test_image_is_attached_and_answered(chromium: Browser, seeing: EngineProcess) -> None:
    """Pictures are chosen, pasted and dropped."""
    chromium.open_fresh(seeing.url)
    chromium.until(lambda: chromium.find("attach").get_attribute("aria-disabled") == "false", "enabled attach button")
    chromium.find("file").send_keys(str(SHAPES))
    chromium.until(lambda: chromium.all("#files img"), "the attached picture")
    chromium.say("How many red shapes are there?")
    assert chromium.answered()[0].endswith(": 3")
    chromium.shoot("picture")
    file = base64.b64encode(SHAPES.read_bytes()).decode()
    for way in ("paste", "drop"):
        chromium.open_fresh(seeing.url)
        assert chromium.check("bring", way, file) is False, "default action is prevented"
        chromium.until(lambda: chromium.all("#files img"), f"attached image by {way}")
        chromium.say("How many red shapes are there?")
        assert chromium.answered()[0].endswith(": 3"), way
    assert chromium.complaints() == []
    assert chromium.foreign_requests(seeing.url) == []


def test_dashboard_shows_actors_and_restarts_one(page: Browser, engine: EngineProcess) -> None:
    page.give_key(ADMIN_KEY, "admin-key")
    page.say("What are you?")
    page.answered()
    page.click("show-engine")
    actors = set(engine.actors())
    page.until(lambda: actors <= set(page.texts("#engine td:first-child")), "a row for each actor")
    page.until(lambda: any(text.endswith(" ago") for text in page.texts(".times small")), "time axis")
    tops = page.texts(".chart .scale small:first-child")
    assert all(tops), "axes have units"
    assert min(float(top.split()[0]) for top in tops) > 0, "axis maximum is above 0 even if all values are 0"
    page.until(lambda: page.texts(".chart .scale small:first-child")[0] != "1.0 /s", "generated tokens on the chart")
    page.shoot("engine")
    page.press("#engine", "log tokenizer0")
    page.until(lambda: page.texts("#engine .log"), "a log")
    epoch = engine.actors()["tokenizer0"]["epoch"]
    page.press("#engine", "Restart tokenizer0")
    page.until(lambda: engine.actors().get("tokenizer0", {}).get("epoch", 0) != epoch, "a restart")
    page.until(engine.is_healthy, "restarted tokenizer")
    page.until(lambda: page.text("status") == "all actors healthy", "healthy engine")
    page.complaints()  # polls while it was unhealthy


def test_missing_or_wrong_api_key_is_reported(chromium: Browser, engine: EngineProcess) -> None:
    chromium.open_fresh(engine.url)
    assert "API key" in chromium.text("status")
    chromium.click("open-settings")
    chromium.find("api-key").send_keys("wrong", Keys.TAB)
    chromium.say("Hello")
    chromium.until(lambda: any("missing or invalid API key" in text for text in chromium.texts(".error")), "401 error")
    chromium.find("api-key").clear()
    chromium.give_key("user")
    chromium.until(lambda: chromium.text("status") == "all actors healthy", "status with the right key")
    chromium.click("show-engine")
    chromium.until(lambda: "admin key" in chromium.text("engine"), "hint about the admin key")
    assert not chromium.texts("#engine button[data-name^=Restart]")


def test_dead_server_is_distinguished_and_comes_back(chromium: Browser) -> None:
    engine = EngineProcess(DEMO)
    engine.start()
    try:
        chromium.open_fresh(engine.url)
        chromium.say("What is 1 + 1?")
        assert chromium.answered() == ["1 + 1 = 2"]
        assert engine.stop() == 0
        chromium.until(lambda: "cannot reach the server" in chromium.text("status"), "status of a stopped server")
        chromium.say("What is 1 + 2?")
        chromium.until(lambda: any("cannot reach the server" in text for text in chromium.texts(".error")), "error in the chat")
        chromium.shoot("server-gone")
        engine = EngineProcess(DEMO, "--port", str(engine.port), "--hang-timeout", "600")  # above the SIGSTOP below
        engine.start()
        chromium.until(lambda: chromium.text("status") == "all actors healthy", "status of the restarted server")
        chromium.press("article:last-of-type", "Regenerate")
        chromium.until(lambda: "1 + 2 = 3" in chromium.texts("article.assistant .body"), "the answer")
        api = int(chromium.until(engine.actors, "the actor table")["api0"]["pid"])
        os.kill(api, signal.SIGSTOP)
        assert chromium.status_of("v1/models") == -1, "a timeout is not reported as a stopped server"
        chromium.until(lambda: "no response" in chromium.text("status"), "status of a slow server")
        os.kill(api, signal.SIGCONT)
        chromium.until(lambda: chromium.text("status") == "all actors healthy", "status after SIGCONT")
    finally:
        engine.close()


def test_hostile_outputs_run_and_load_nothing(page: Browser, tmp_path: Path) -> None:
    """300 outputs as answers, thoughts, calls and errors of an imported conversation."""
    nodes: dict[str, dict[str, object]] = {}
    for index, text in enumerate(OUTPUTS):
        calls = [{"id": text, "name": text, "arguments": text}]
        extra = (
            {"reasoning": text, "error": text, "note": text} if index % 3 == 0 else {"calls": calls} if index % 3 == 1 else {}
        )
        nodes[str(index + 1)] = {
            "id": str(index + 1),
            "parent": str(index or ""),
            "role": "assistant",
            "content": text,
            **extra,
        }
    tree = {"id": "x", "title": OUTPUTS[0], "changed": 0, "next": len(nodes) + 1, "nodes": nodes}
    tree["chosen"] = {str(index or ""): str(index + 1) for index in range(len(OUTPUTS))}
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps(tree))
    page.find("import-file").send_keys(str(file))
    page.until(lambda: len(page.all("article")) == len(OUTPUTS), "all messages")
    assert page.script("return [typeof window.pwned, document.title]") == ["undefined", "Tokamak"]
    assert page.check("dangerous", "#talk") == []
    assert all("violates the following Content Security Policy" in text for text in page.complaints())  # blocked and logged
    assert page.text("send") == "Send"


SHOWN = """Sum $\\frac{a}{b}$ and \\(x^2\\), from $5 to $10:

$$\\sqrt{\\sum_{i=0}^n i}$$

```python
def f(x):  # twice
    return 2 * x
```
"""
HOSTILE_FORMULAS = (
    r"$\\href{javascript:window.pwned=1}{x}$",
    r"$\\includegraphics{http://203.0.113.9/x}$",
    r"$$\\htmlClass{offscreen}{x} \\htmlStyle{position:fixed}{x} \\htmlId{send}{x}$$",
    r"$\\text{<img src=x onerror=window.pwned=1>}$",
    r"\\(\\def\\x{\\x\\x}\\x\\)",
    "```math\n<script>window.pwned=1</script>\n```",
    "```html\n<img src=x onerror=window.pwned=1><script>window.pwned=1</script>\n```",
    "```js\n</code></pre><img src=x onerror=window.pwned=1>\n```",
    "<code class='language-math-block'><img src=x onerror=window.pwned=1>x^2</code>",
    "<code class='offscreen'>x</code><span class='hljs-x'>x</span><p class='error'>x</p>",
    "[x](javascript:window.pwned=1) <a href='javascript:window.pwned=1'>x</a>",
)


def conversation(file: Path, title: str, *texts: str) -> Path:
    """Write a file for the import: a question, and an answer for each text."""
    nodes: dict[str, dict[str, object]] = {"1": {"id": "1", "parent": "", "role": "user", "content": title}}
    for number, text in enumerate(texts, 2):
        nodes[str(number)] = {"id": str(number), "parent": str(number - 1), "role": "assistant", "content": text}
    chosen = {str(number or ""): str(number + 1) for number in range(len(nodes))}
    tree = {"id": "x", "title": title, "changed": 0, "next": len(nodes) + 1, "nodes": nodes, "chosen": chosen}
    file.write_text(json.dumps(tree))
    return file


def test_code_and_formulas_are_shown(page: Browser, tmp_path: Path) -> None:
    page.find("import-file").send_keys(str(conversation(tmp_path / "a.json", "Formulas and code", SHOWN)))
    page.until(lambda: page.all("article.assistant .katex"), "formulas")
    assert len(page.all("article.assistant .formula .katex-html")) == 3
    assert "from $5 to $10:" in page.texts("article.assistant .body")[0]
    assert page.texts("article.assistant .hljs-keyword") == ["def", "return"]
    assert page.texts("article.assistant .hljs-comment") == ["# twice"]
    assert page.script("return document.fonts.ready.then(() => [...document.fonts].some((one) => one.status === 'loaded'))")
    page.click("open-settings")
    page.shoot("formulas")
    for scheme in ("light", "dark"):
        page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert page.check("pale") == []
    page.devtools("Emulation.setEmulatedMedia", features=[])


def test_hostile_formulas_code_and_titles_run_nothing(page: Browser, tmp_path: Path) -> None:
    title = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script>"
    page.find("import-file").send_keys(str(conversation(tmp_path / "a.json", title, *HOSTILE_FORMULAS)))
    page.until(lambda: len(page.all("article.assistant")) == len(HOSTILE_FORMULAS), "all messages")
    assert page.script("return typeof window.pwned") == "undefined"
    assert page.texts("#conversations .title") == [title]
    assert not page.all(
        "#talk script, #talk img, #talk a[href], #talk .offscreen, .body .error, .body [id], #conversations img"
    )
    assert all("Content Security Policy" in text for text in page.complaints())  # blocked and logged


def test_hostile_model_name_runs_nothing(chromium: Browser, seeing: EngineProcess) -> None:
    """The name is shown in the header, in an answer, and among the metrics of the engine."""
    chromium.open_fresh(seeing.url)
    chromium.until(lambda: chromium.text("model") == HOSTILE_NAME, "model name as plain text")
    chromium.say("What are you?")
    chromium.answered()
    chromium.give_key(ADMIN_KEY, "admin-key")
    chromium.click("show-engine")
    chromium.until(lambda: chromium.texts("#engine td:first-child"), "dashboard metrics")
    assert chromium.script("return typeof window.pwned") == "undefined"
    assert not chromium.all("img[src=x]")
    assert chromium.complaints() == []


def test_answer_under_way_survives_a_reload(page: Browser, engine: EngineProcess) -> None:
    page.script("document.querySelector('#settings details').open = true")
    page.set("min tokens", "1900")
    page.set("max completion tokens", "1900")  # leaves room to continue if the answer ends before the worker is stopped
    page.say("What are you?")
    page.until(lambda: len("".join(page.texts("article.assistant .body"))) > 20, "the beginning of an answer")
    engine.kill("worker0", signal.SIGSTOP)
    try:
        page.until(lambda: page.check("keptText").startswith(page.texts("article.assistant .body")[0][:20]), "saved text")
        page.driver.refresh()
        page.until(lambda: page.texts("article.assistant .body"), "conversation after the reload")
    finally:
        engine.kill("worker0", signal.SIGCONT)
    (text,) = page.answered()
    assert len(text) > 20
    assert page.texts("article.user .body") == ["What are you?"]
    page.click("open-settings")
    page.script("document.querySelector('#settings details').open = true")
    page.set("min tokens", "")
    page.set("max completion tokens", "8")
    page.press("article.assistant", "Continue")
    page.until(lambda: len(page.answered()[0]) > len(text), "continued answer")
    page.complaints()


def test_start_shows_model_and_questions(page: Browser) -> None:
    assert page.text("model") == "tokamak-demo"
    assert page.texts(".starter") == ["What are you?", "What is 12 + 345?", "Reverse the word planet", "What is Tokamak?"]
    page.click("open-settings")
    page.shoot("start")
    page.press(".starters", "What is 12 + 345?")
    assert page.answered() == ["12 + 345 = 357"]
    assert page.all("article.assistant .actions button[aria-label=Copy]")
    space = (
        "const one = document.querySelector('article.user'); return one.offsetHeight - one.querySelector('.body').offsetHeight"
    )
    assert page.script(space) < 30, "there is no empty row below a question"
    row, title = page.script(
        "return ['#conversations li', '#conversations .title'].map((one) => document.querySelector(one).clientWidth)"
    )
    assert title >= row - 2, "hidden icons take no room"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible_names_narrow_screen_and_contrast(page: Browser, scheme: str) -> None:
    page.say("What is 12 + 345?")
    page.answered()
    page.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.devtools("Emulation.setDeviceMetricsOverride", width=NARROW, height=HIGH, deviceScaleFactor=1, mobile=True)
    try:
        for view in ("show-chat", "show-engine"):
            if page.find("settings").is_displayed():
                page.click("open-settings")
            page.click(view)
            page.until(lambda: page.all("article, #engine table"), "the view")
            assert page.script("return document.documentElement.scrollWidth") <= NARROW
            assert page.script("const name = document.getElementById('model'); return name.scrollWidth - name.clientWidth") <= 0
            assert page.check("nameless") == []
            assert page.check("pale") == []
            if (scheme, view) == ("dark", "show-chat"):
                page.shoot("narrow-dark-chat")
    finally:
        page.devtools("Emulation.clearDeviceMetricsOverride")
        page.devtools("Emulation.setEmulatedMedia", features=[])


def test_all_controls_are_reached_by_keyboard(page: Browser) -> None:
    """Tab alone reaches each visible control from the top of the page; Enter sends."""
    page.click("open-settings")
    page.script("document.activeElement.blur()")
    reached: set[str] = set()
    for _ in range(40):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(str(page.script("return document.activeElement.id || document.activeElement.textContent")))
    assert {"show-chat", "show-engine", "open-settings", "new", "find", "talk", "attach", "input", "send"} <= reached
