"""Headless Chromium with the actions of a user of the page."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.waiting import WATCHDOG_S, wait_until

CHECKS = Path(__file__).with_name("checks.js")
SWITCHES = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900")
NUM_COLORS = 64  # of a screenshot
EXPECTED = ("Password field is not contained in a form", "401 (Unauthorized)")


class Browser:
    def __init__(self, driver: str, chromium: str, screenshots: Path | None = None) -> None:
        """Start the browser; `screenshots` is the directory for screenshots."""
        self._screenshots = screenshots
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for argument in SWITCHES:
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        self.driver.set_script_timeout(WATCHDOG_S)

    def quit(self) -> None:
        self.driver.quit()

    def open_fresh(self, url: str) -> None:
        """Open a page with empty storage."""
        self.driver.get("about:blank")
        self.devtools("Storage.clearDataForOrigin", origin=url, storageTypes="all")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(url)
        self.script("sessionStorage.clear()")
        self.driver.get(url)
        self.until(lambda: self.text("status") != "connecting", "first poll of the server")

    def give_key(self, key: str, field: str = "api-key") -> None:
        if not self.find("settings").is_displayed():
            self.click("open-settings")
        self.find(field).send_keys(key, Keys.TAB)
        self.until(lambda: self.all("#settings details input[type=number]"), "request fields of the server")

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, parameters)

    def script(self, text: str, *arguments: object) -> Any:
        return self.driver.execute_script(text, *arguments)

    def status_of(self, path: str) -> int:
        """Return the status of the error that a request ends in, as the page's own code reports it."""
        text = (
            "const [path, done] = arguments;"
            "import('/page/server.js').then(({ get }) => get(path)).then(done, (error) => done(error.status))"
        )
        return int(self.driver.execute_async_script(text, path))

    def check(self, name: str, *arguments: object) -> Any:
        """Return the result of a function of checks.js."""
        return self.script(f"{CHECKS.read_text()}\nreturn {name}(...arguments)", *arguments)

    def find(self, id_: str) -> WebElement:
        return self.driver.find_element(By.ID, id_)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, id_: str) -> str:
        return str(self.script("return document.getElementById(arguments[0]).textContent", id_))

    def texts(self, selector: str) -> list[str]:
        return list(
            self.script("return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent.trim())", selector)
        )

    def click(self, id_: str) -> None:
        self.find(id_).click()

    def press(self, selector: str, name: str) -> None:
        """Press the last button with that accessible name or text, by a script, because tables are redrawn."""
        found = self.until(
            lambda: self.script(
                "const all = [...document.querySelectorAll(arguments[0] + ' button')].filter((one) =>"
                " one.textContent === arguments[1] || one.getAttribute('aria-label') === arguments[1]);"
                " all.at(-1)?.click(); return all.length",
                selector,
                name,
            ),
            f"a button {name!r} in {selector}",
        )
        assert found

    def set(self, label: str, value: str) -> None:
        """Set a field of the settings."""
        path = f"//aside[@id='settings']//label[span[text()='{label}']]/*[self::input or self::textarea or self::select]"
        field = self.driver.find_element(By.XPATH, path)
        if field.get_attribute("type") == "checkbox":
            field.click()
        elif field.tag_name == "select":
            field.send_keys(value)
        else:
            field.send_keys(Keys.CONTROL, "a")
            field.send_keys(Keys.DELETE, value, Keys.TAB)

    def say(self, text: str) -> None:
        self.find("input").send_keys(text, Keys.ENTER)

    def answered(self) -> list[str]:
        """Return the texts of all shown answers once the last one is complete."""
        self.until(lambda: self.text("send") == "Send" and self.all("article.assistant .actions small"), "an answer")
        return self.texts("article.assistant .body")

    def until(self, predicate: Any, what: str) -> Any:
        return wait_until(predicate, what=what)

    def shoot(self, name: str) -> None:
        """Save a screenshot if asked for, with few colours to keep it small."""
        if self._screenshots is not None:
            self._screenshots.mkdir(parents=True, exist_ok=True)
            whole = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
            whole.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(self._screenshots / f"{name}.png", optimize=True)

    def complaints(self) -> list[str]:
        """Return the unexpected messages on the browser's console."""
        logged = [str(entry["message"]) for entry in self.driver.get_log("browser")]
        return [text for text in logged if not any(expected in text for expected in EXPECTED)]

    def foreign_requests(self, url: str) -> list[str]:
        """Return requested addresses that are not the server's."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [address for address in asked if not address.startswith((url, "data:", "blob:", "about:"))]
