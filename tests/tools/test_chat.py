"""`tokamak chat` against a real server: as a process, on a pipe and on a terminal."""

from __future__ import annotations

import base64
import fcntl
import os
import pty
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.paths import REPOSITORY
from tests.tools.openai_server import API_KEY, Behaviour, openai_server
from tests.waiting import WATCHDOG_S, wait_until
from tools.chat.conversation import printable

CODE = "import sys; from tools.chat.command import main; sys.exit(main(sys.argv[1:]))"
COMMAND = [sys.executable, "-c", CODE]
ON_TERMINAL = [sys.executable, "-c", f"import os; os.close(os.open(os.ttyname(0), os.O_RDWR)); {CODE}"]  # Ctrl+C is sent to it
CHAT = "/v1/chat/completions"


def chat(*arguments: str, piped: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=REPOSITORY, input=piped, capture_output=True, text=True, timeout=WATCHDOG_S, check=False
    )


class TerminalChat:
    """A chat on a pseudo terminal."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self.screen = ""

    @property
    def quit_key(self) -> bytes:
        """The key that the terminal turns into SIGQUIT."""
        return bytes(termios.tcgetattr(self._terminal)[6][termios.VQUIT])

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def ask(self, text: str) -> None:
        """Type a line at the next prompt, and wait for the end of its answer."""
        self.until("> ")
        self.type(text + "\n")
        self.until("tokens in")

    def until(self, text: str, timeout_s: float = WATCHDOG_S) -> str:
        """Return the output up to `text`, and remove it from the screen."""
        deadline = time.monotonic() + timeout_s
        while text not in self.screen:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {text!r} in {self.screen!r}")
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.screen += os.read(self._terminal, 4096).decode()
        before, _, self.screen = self.screen.partition(text)
        return before


@contextmanager
def terminal_chat(*arguments: str, term: str = "dumb", cache: Path | None = None) -> Iterator[TerminalChat]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_CACHE_HOME": str(cache or "/nowhere")}
    process = subprocess.Popen(
        [*ON_TERMINAL, *arguments],
        cwd=REPOSITORY,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield TerminalChat(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_one_shot() -> None:
    with openai_server() as server:
        done = chat("--url", server.url, "--system", "be short", "--max-tokens", "2", "--seed", "3", "what", "now?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "w0 w1 \n", "")
    (body,) = server.bodies(CHAT)
    assert body["messages"] == [{"role": "system", "content": "be short"}, {"role": "user", "content": "what now?"}]
    assert (body["model"], body["max_tokens"], body["seed"], body["stream"]) == ("first", 2, 3, True)
    assert "temperature" not in body


def test_piped_text_joins_the_prompt() -> None:
    with openai_server() as server:
        assert chat("--url", server.url, "--model", "second", piped="some text\n").returncode == 0
        assert chat("--url", server.url, "Summarize:", piped="some text\n").returncode == 0
    first, second = server.bodies(CHAT)
    assert first["messages"][-1]["content"] == "some text"
    assert first["model"] == "second"
    assert second["messages"][-1]["content"] == "Summarize:\n\nsome text"


def test_bytes_that_are_no_text_are_replaced() -> None:
    with openai_server() as server:
        done = chat("--url", server.url, "--system", os.fsdecode(b"be \xff"), os.fsdecode(b"what \xfe"))
    assert (done.returncode, done.stderr) == (0, "")
    (body,) = server.bodies(CHAT)
    assert [message["content"] for message in body["messages"]] == ["be ?", "what ?"]


def test_half_characters_and_control_characters() -> None:
    """Packets that split a character; text that would control the terminal."""
    with openai_server(Behaviour(pieces=("gr\u00fc\u00df \U0001f600", "\x1b[2J\x07!"), bytes_per_packet=3)) as server:
        done = chat("--url", server.url, "hello")
    assert done.stdout == "gr\u00fc\u00df \U0001f600[2J!\n"


def test_printable() -> None:
    assert printable("a\tb\n\u00e9\u4e2d\x9b\x7f\x00") == "a\tb\n\u00e9\u4e2d"


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (Behaviour(needs_key=True), "answers 401: wrong key"),
        (Behaviour(error_in_stream="no blocks"), "no blocks"),
        (Behaviour(cut_every=1), "before the reply was complete"),
    ],
)
def test_errors_are_shown_without_traceback(behaviour: Behaviour, message: str) -> None:
    with openai_server(behaviour) as server:
        done = chat("--url", server.url, "hello")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key() -> None:
    with openai_server(Behaviour(needs_key=True)) as server:
        assert chat("--url", f"{server.url}/v1", "--api-key", API_KEY, "hello").returncode == 0


def test_unreachable_server_is_named() -> None:
    done = chat("--url", "http://127.0.0.1:1", "hello")
    assert done.returncode == 1
    assert "no server listens on http://127.0.0.1:1" in done.stderr
    assert chat("--url", "ftp://somewhere", "hello").returncode == 2
    assert "no prompt: pass PROMPT or pipe in text" in chat().stderr


PICTURE = b"\x89PNG\r\n\x1a\n..."


def test_pictures_are_asked_about(tmp_path: Path) -> None:
    file, clip = tmp_path / "a.png", tmp_path / "b.mp4"
    file.write_bytes(PICTURE)
    clip.write_bytes(b"\0\0\0\x18ftypmp42")
    with openai_server() as server:
        assert chat("--url", server.url, "--image", str(file), "--image", str(clip), "what?").returncode == 0
        (body,) = server.bodies(CHAT)
        picture, video, text = body["messages"][0]["content"]
        assert picture["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
        assert video["video_url"]["url"].startswith("data:video/mp4;base64,")
        assert text == {"type": "text", "text": "what?"}
        for wrong, message in ((tmp_path / "none", "cannot be read"), (Path(__file__), "not an image or video")):
            done = chat("--url", server.url, "--image", str(wrong), "what?")
            assert (done.returncode, message in done.stderr) == (2, True)


def test_a_picture_stays_in_its_conversation(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(PICTURE)
    with openai_server() as server, terminal_chat("--url", server.url) as terminal:
        terminal.until("> ")
        terminal.type("/image nowhere\n")
        terminal.until("cannot be read")
        terminal.until("> ")
        terminal.type(f"/image {file}\n")
        terminal.until("next question")
        terminal.ask("one")
        terminal.ask("two")
        terminal.until("> ")
        terminal.type(f"/image {file}\n")
        terminal.until("next question")
        terminal.ask("/retry")
        terminal.ask("three")
        first, second, again, third = server.bodies(CHAT)
    assert [part["type"] for part in first["messages"][0]["content"]] == ["image_url", "text"]
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][-1] == {"role": "user", "content": "two"}
    assert again["messages"] == second["messages"]
    assert [part["type"] for part in third["messages"][-1]["content"]] == ["image_url", "text"]


def test_a_conversation_has_a_history() -> None:
    with openai_server() as server, terminal_chat("--url", server.url) as terminal:
        terminal.until("first. Type /help")
        terminal.until("> ")
        for question in ("one", "two"):
            terminal.type(question + "\n")
            terminal.until("w0 w1 w2")
            terminal.until("3 tokens in")
            terminal.until("> ")
        terminal.type("/clear\n")
        terminal.until("started a new conversation")
        terminal.until("> ")
        terminal.type("/system be kind\n")
        terminal.until("system prompt set")
        terminal.until("> ")
        terminal.type("three\n")
        terminal.until("w0 w1 w2")
        terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.process.wait(WATCHDOG_S) == 0
    roles = [[message["role"] for message in body["messages"]] for body in server.bodies(CHAT)]
    assert roles == [["user"], ["user", "assistant", "user"], ["system", "user"]]
    assert server.bodies(CHAT)[1]["messages"][1]["content"] == "w0 w1 w2 "


def test_ctrl_c_stops_a_reply_but_keeps_it() -> None:
    behaviour = Behaviour(hang_after=3)
    with openai_server(behaviour) as server, terminal_chat("--url", server.url) as terminal:
        terminal.until("> ")
        terminal.type("one\n")
        terminal.until("w0 w1")
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.until("stopped")
        wait_until(lambda: server.num_disconnects == 1, what="the server sees that the client left")
        behaviour.hang_after = -1
        terminal.until("> ")
        terminal.type("two\n")
        terminal.until("w0 w1 w2")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(WATCHDOG_S) == 0
    assert server.bodies(CHAT)[1]["messages"][1] == {"role": "assistant", "content": "w0 w1 "}


def test_each_piped_line_is_a_message() -> None:
    with openai_server(Behaviour(thoughts=("hm",), pieces=("**an** ", "answer"))) as server:
        done = chat("--url", server.url, piped="one\n\n  /help\nthree")
    assert (done.returncode, done.stdout, done.stderr) == (0, "**an** answer\n" * 3, "")
    questions = [
        [message["content"] for message in body["messages"] if message["role"] == "user"] for body in server.bodies(CHAT)
    ]
    assert questions == [["one"], ["one", "/help"], ["one", "/help", "three"]]


def test_piped_line_is_answered_before_the_next() -> None:
    with openai_server() as server:
        process = subprocess.Popen(
            [*COMMAND, "--url", server.url], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            for question in ("one", "two"):
                process.stdin.write(question + "\n")
                process.stdin.flush()
                assert process.stdout.readline() == "w0 w1 w2 \n"
            process.stdin.close()
            assert process.wait(WATCHDOG_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_retry_replaces_the_last_answer(term: str, tmp_path: Path) -> None:
    with openai_server() as server, terminal_chat("--url", server.url, term=term, cache=tmp_path) as terminal:
        terminal.until("/help")
        terminal.until(">")
        terminal.type("/retry\r")
        terminal.until("no question to repeat")
        terminal.until(">")
        for question in ("one", "two", "/retry", "/retry"):
            terminal.type(question + "\r")
            terminal.until("tokens in")
            terminal.until(">")
        terminal.type("\x04")
        assert terminal.process.wait(WATCHDOG_S) == 0
    conversations = [[message["content"] for message in body["messages"]] for body in server.bodies(CHAT)]
    assert conversations == [["one"], *[["one", "w0 w1 w2 ", "two"]] * 3]


MARKED = ("# Title\n\nSome **bold** and `code`.\n\n", "- one\n- two\n\n```py\nx = 1\n```\n", "&#27;[2Ja list<int> \x1b[2J")


def test_terminal_shows_markdown_and_reasoning(tmp_path: Path) -> None:
    behaviour = Behaviour(thoughts=("let me ", "think"), pieces=MARKED)
    with (
        openai_server(behaviour) as server,
        terminal_chat("--url", server.url, term="xterm-256color", cache=tmp_path) as terminal,
    ):
        terminal.until("/help")
        terminal.until(">")
        terminal.type("one\r")
        shown = terminal.until("tokens in")
        assert "\x1b[2mlet me " in shown
        for raw in ("**", "`", "# Title", "- one"):
            assert raw not in shown
        for text in ("Title", "bold", "\u2022", "two", "list<int>"):
            assert text in shown
        assert "\x1b[2J" not in shown
        terminal.until(">")
        os.kill(terminal.process.pid, signal.SIGWINCH)
        terminal.type("\x1b[A\x15\x04")  # up, forget the line, leave
        assert terminal.process.wait(WATCHDOG_S) == 0
    history = tmp_path / "tokamak" / "chat_history"
    assert "+one" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_ctrl_c_ends_the_answer_on_a_terminal(tmp_path: Path) -> None:
    behaviour = Behaviour(hang_after=3)
    with (
        openai_server(behaviour) as server,
        terminal_chat("--url", server.url, term="xterm-256color", cache=tmp_path) as terminal,
    ):
        terminal.until("/help")
        terminal.until(">")
        terminal.type("one\r")
        terminal.until("w0")
        terminal.type("\x03")
        terminal.until("stopped")
        behaviour.hang_after = -1
        terminal.until(">")
        terminal.type("two\r")
        terminal.until("w0 w1 w2")
        terminal.until("tokens in")
        terminal.until(">")
        terminal.type("\x03")  # while a line is typed
        terminal.until("Ctrl+D to quit")
        terminal.until(">")
        terminal.type("\x04")
        assert terminal.process.wait(WATCHDOG_S) == 0
    assert [message["role"] for message in server.bodies(CHAT)[1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_ctrl_d_during_an_answer_quits(term: str, tmp_path: Path) -> None:
    with (
        openai_server(Behaviour(hang_after=3)) as server,
        terminal_chat("--url", server.url, term=term, cache=tmp_path) as terminal,
    ):
        terminal.until("/help")
        terminal.until(">")
        assert terminal.quit_key == b"\x1c"
        terminal.type("one\r")
        terminal.until("w0")
        terminal.type("typed ahead\x04\x04")
        terminal.until("stopped")
        wait_until(lambda: server.num_disconnects == 1, what="the server sees that the client left")
        assert terminal.process.wait(WATCHDOG_S) == 0
        assert "Traceback" not in terminal.screen
        assert terminal.quit_key == b"\x1c"
    assert len(server.bodies(CHAT)) == 1


def test_chat_ended_during_an_answer_restores_keys(tmp_path: Path) -> None:
    with (
        openai_server(Behaviour(hang_after=3)) as server,
        terminal_chat("--url", server.url, term="xterm-256color", cache=tmp_path) as terminal,
    ):
        terminal.until("/help")
        terminal.until(">")
        terminal.type("one\r")
        terminal.until("w0")
        assert terminal.quit_key == b"\x04"
        terminal.process.terminate()
        assert terminal.process.wait(WATCHDOG_S) == 128 + signal.SIGTERM
        assert "Traceback" not in terminal.screen
        assert terminal.quit_key == b"\x1c"
