"""Ask a running server and transformers the same held-out questions about pictures, and count the answers that agree.

    pip install torch==2.13.0 torchvision==0.28.0 transformers==5.23.0 httpx pillow numpy
    tools/serve --demo vision
    python -m tools.demo.vision.agreement --url http://127.0.0.1:8000/v1 --count 20

Run by hand. transformers uses its own processors for pictures and text, in float32. Exit code 1 if any answer differs, 2 if the
server cannot be asked.
"""

import argparse
import asyncio
import sys
from io import BytesIO
from pathlib import Path

import httpx
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tools.demo import VISION_MODEL
from tools.demo.vision.batches import FRAMES_PER_SECOND
from tools.demo.vision.evaluate import MAX_ANSWER_TOKENS, ask_all, files
from tools.demo.vision.examination import GROUPS, Question


class Reference:
    """Load the checkpoint in transformers."""

    def __init__(self, path: Path) -> None:
        self._processor = AutoProcessor.from_pretrained(path)
        self._model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)

    @torch.no_grad()
    def answer(self, question: Question) -> str:
        seen = [Image.open(BytesIO(file)) for file in files(question)]
        if question.kind == "clip":
            shown = [{"type": "video"}]
            clock = {"fps": FRAMES_PER_SECOND, "total_num_frames": len(seen), "frames_indices": list(range(len(seen)))}
            media = {"videos": [seen], "video_metadata": [clock], "do_sample_frames": False}
        else:
            shown = [{"type": "image"}] * len(seen)
            media = {"images": seen}
        messages = [{"role": "user", "content": [*shown, {"type": "text", "text": question.turn.text}]}]
        prompt = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = self._processor(text=[prompt], return_tensors="pt", **media)
        tokens = self._model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        return self._processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", type=Path, default=VISION_MODEL)
    parser.add_argument("--count", type=int, default=20, help="questions, of all kinds alike")
    parser.add_argument("--seed", type=int, default=0, help="which held-out questions")
    options = parser.parse_args()
    each = -(-options.count // len(GROUPS))
    questions = [question for group in GROUPS for question in group.questions(each, options.seed)][: options.count]
    try:
        answers = asyncio.run(ask_all(options.url, questions, len(questions)))
    except httpx.HTTPError as error:
        print(f"cannot ask {options.url}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    reference = Reference(options.model)
    num_same = 0
    for question, answer in zip(questions, answers, strict=True):
        wanted = reference.answer(question)
        num_same += answer == wanted
        if answer != wanted:
            print(f"{question.kind}: {question.turn.text!r} -> {answer!r}, transformers {wanted!r}")
    print(f"{num_same} of {len(questions)} answers are those of transformers", flush=True)
    return 0 if num_same == len(questions) else 1


if __name__ == "__main__":
    sys.exit(main())
