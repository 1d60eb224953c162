"""A harness: an agent of your own talks to the model in training through OpenAI's API.

    pip install openai
    python examples/harness.py [key=value ...]

`run` gets a problem and an address, asks as often as it likes with any client of OpenAI's API, or
starts a program that does, and returns a reward. Each request is a turn of one conversation, and is
learned from with the tokens that were sampled. This agent asks for an answer, then has it checked.
"""

import re
import sys

import openai

import tramontane


def right(problem, text):
    found = re.findall(r"\\boxed\{(-?\d+)\}", text)
    return float(bool(found) and found[-1] == problem.answer)


class Checked:
    """Two thirds of the reward are for the answer that was checked, one third for the first."""

    def run(self, problem, base_url):
        client = openai.OpenAI(base_url=base_url, api_key="none")
        chat = [{"role": "user", "content": problem.problem}]
        scores = []
        for _ in range(2):
            answer = client.chat.completions.create(model="tramontane", messages=chat)
            message = answer.choices[0].message
            scores.append(right(problem, message.content or ""))
            chat += [message, {"role": "user", "content": problem.problem}]
        return (scores[0] + 2 * scores[1]) / 3


if __name__ == "__main__":
    settings = ["name=harness", "conversation.reward=last", "pipeline.l_max=320", *sys.argv[1:]]
    tramontane.train("examples/small.yaml", settings, environment=Checked)
