"""The texts of the demo's four tenants, made from templates and word lists: no licence, nobody's data.

Lengths are lognormal, as real data sets' are, and differ between tenants by an order of magnitude. A response follows
from its prompt and has a fixed form, so that an adapter learns it within a few steps.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

SEED = 7


def words(text: str) -> list[str]:
    return text.split()


NAMES = words(
    "Ana Ben Chen Dora Emil Fatou Goran Hana Ivo Jana Kofi Lena Marco Nina Omar Petra Quentin Rosa Samir Tomas Ursula "
    "Viktor Wanda Xenia Yusuf Zora Alejandro Bronwyn Charlotte Dimitri Elisabeth Francesca Giovanni Heinrich Ingrid"
)
GOODS = words(
    "apples books pencils stamps tickets cups shells coins plates cards marbles flowers sandwiches photographs "
    "bicycles postcards envelopes candles bottles ribbons notebooks umbrellas chestnuts magazines"
)
GAINS = [
    "buys {n} more",
    "finds {n} more",
    "is given {n} more",
    "collects {n} more",
    "borrows {n} more",
    "wins {n} more",
]
LOSSES = ["gives away {n}", "loses {n}", "sells {n}", "breaks {n}", "lends {n} to a friend", "returns {n} to the shop"]
PRODUCTS = words(
    "kettle router printer headset lamp keyboard camera heater dishwasher microphone telephone scooter thermostat "
    "loudspeaker projector refrigerator doorbell vacuum tablet monitor"
)
FAULTS = [
    "does not turn on",
    "makes a loud noise",
    "arrived damaged",
    "loses its connection",
    "shows an error light",
    "smells of burnt plastic",
    "switches off after a few minutes",
    "cannot find the network",
]
FIXES = [
    "hold the power button for ten seconds",
    "unplug it and wait one minute",
    "install the latest update from our page",
    "check that the cable sits firmly",
    "clean the contacts with a dry cloth",
    "move it closer to the window",
    "replace both batteries",
    "reset it to the factory settings",
]
VERBS = {
    "count": ("Count the {noun} in a list.", "    return len({noun})"),
    "total": ("Add up all {noun}.", "    return sum({noun})"),
    "largest": ("Return the largest of the {noun}.", "    return max({noun})"),
    "unique": ("Return the distinct {noun} in sorted order.", "    return sorted(set({noun}))"),
    "doubled": ("Return every one of the {noun} times two.", "    return [2 * item for item in {noun}]"),
    "mean": ("Return the mean of the {noun}.", "    return sum({noun}) / len({noun})"),
    "positive": ("Keep the {noun} above zero.", "    return [item for item in {noun} if item > 0]"),
    "smallest": ("Return the smallest of the {noun}.", "    return min({noun})"),
    "reversed": ("Return the {noun} from last to first.", "    return list(reversed({noun}))"),
    "spread": (
        "Return the difference between highest and lowest of the {noun}.",
        "    return max({noun}) - min({noun})",
    ),
    "running": (
        "Return the running sums of the {noun}.",
        "    sums = []\n    for item in {noun}:\n        sums.append(sum(sums[-1:]) + item)\n    return sums",
    ),
}
NOUNS = words(
    "prices scores weights ages heights orders delays budgets readings ranks temperatures distances durations "
    "salaries voltages balances invoices quantities percentages altitudes"
)
TOPICS = [
    "the budget",
    "the release",
    "hiring",
    "the new office",
    "customer feedback",
    "the test plan",
    "the website",
    "the security review",
    "next year's conference",
    "the database migration",
    "our travel expenses",
    "the advertising campaign",
    "the supplier contract",
    "mobile navigation",
]
REMARKS = [
    "I looked at {topic} last week and I think we are on track.",
    "We still need a decision about {topic} before Friday.",
    "Could somebody explain what changed in {topic}?",
    "My worry is that {topic} takes longer than we planned.",
    "The numbers for {topic} are better than in the last quarter.",
    "Let us not forget that {topic} depends on the other team.",
    "I agree, and I would keep {topic} simple for now.",
    "Our colleagues abroad asked twice whether {topic} can wait until summer.",
    "Management promised additional people for {topic}.",
    "Honestly, nobody understands the documentation of {topic} yet.",
]
ACTIONS = [
    "write a proposal for",
    "collect the numbers on",
    "talk to the team about",
    "prepare a review of",
    "organise a workshop about",
    "estimate the cost of",
]


def skewed(rng: random.Random, median: float, spread: float, low: int, high: int) -> int:
    """A lognormal count, clipped to [low, high]."""
    return min(high, max(low, round(median * rng.lognormvariate(0.0, spread))))


def arithmetic_row(rng: random.Random) -> Row:
    name, goods = rng.choice(NAMES), rng.choice(GOODS)
    total = rng.randint(5, 30)
    story, work = [f"{name} has {total} {goods}."], []
    for _ in range(skewed(rng, 1.3, 0.6, 1, 5)):
        change = rng.randint(1, 9)
        gains = total < 10 or rng.random() < 0.5
        story.append(f"{name} {rng.choice(GAINS if gains else LOSSES).format(n=change)}.")
        after = total + change if gains else total - change
        work.append(f"{total} {'+' if gains else '-'} {change} = {after}")
        total = after
    question = " ".join([*story, f"How many {goods} does {name} have?"])
    return {
        "prompt": f"Question: {question}\nAnswer:",
        "response": f" {'; '.join(work)}. The answer is {total} {goods}.",
    }


def support_row(rng: random.Random) -> Row:
    product = rng.choice(PRODUCTS)
    messages = [
        {"role": "user", "content": f"Hello, my {product} {rng.choice(FAULTS)}. What should I do?"},
        {
            "role": "assistant",
            "content": f"I am sorry about your {product}. Please {rng.choice(FIXES)}. Did that help?",
        },
    ]
    for _ in range(skewed(rng, 0.7, 0.9, 0, 4)):
        fix = rng.choice(FIXES)
        messages.append({"role": "user", "content": f"No, the {product} still {rng.choice(FAULTS)}."})
        messages.append({"role": "assistant", "content": f"Thank you for trying. Please {fix}. Did that help?"})
    if rng.random() < 0.4:
        messages.append({"role": "user", "content": "Yes, it works now. Thanks!"})
        messages.append({"role": "assistant", "content": f"Great! Enjoy your {product}, and have a nice day."})
    return {"messages": messages}


def code_row(rng: random.Random) -> Row:
    wishes, functions = [], []
    for _ in range(skewed(rng, 1.5, 0.55, 1, 5)):
        verb, noun = rng.choice(sorted(VERBS)), rng.choice(NOUNS)
        purpose, body = (part.format(noun=noun) for part in VERBS[verb])
        wishes.append(f"# {verb}_{noun}: {purpose}")
        functions.append(
            f'def {verb}_{noun}({noun}):\n    """{purpose}\n\n    Args:\n        {noun}: a list of numbers.\n    """\n'
            f'    if not {noun}:\n        raise ValueError("{noun} is empty")\n{body}\n'
        )
    return {"prompt": "# Write these functions.\n" + "\n".join(wishes) + "\n\n", "response": "\n\n".join(functions)}


def meetings_row(rng: random.Random) -> Row:
    people, topics = rng.sample(NAMES, 4), rng.sample(TOPICS, 3)
    num_remarks = skewed(rng, 17, 0.45, 7, 44)
    remarks = [
        f"{rng.choice(people)}: {rng.choice(REMARKS).format(topic=rng.choice(topics))}" for _ in range(num_remarks)
    ]
    owners = rng.sample(people, rng.randint(1, 3))
    actions = [f"{owner} will {rng.choice(ACTIONS)} {rng.choice(topics)}." for owner in owners]
    remarks += [f"{action.split()[0]}: I{action.removeprefix(action.split()[0])}" for action in actions]
    points = "\n".join(
        f"- {line}" for line in [f"The team talked about {', '.join(topics[:-1])} and {topics[-1]}.", *actions]
    )
    return {
        "prompt": "Minutes of the meeting\n" + "\n".join(remarks) + "\n\nSummary:\n",
        "response": f"Present: {', '.join(sorted(people))}.\n{points}\nThe next meeting is on Monday.\n",
    }


@dataclass(frozen=True, slots=True)
class DemoTenant:
    """One tenant of the demo: how a row is made, and how many there are."""

    name: str
    make_row: Callable[[random.Random], Row]
    num_rows: int

    def rows(self, purpose: str) -> Iterator[Row]:
        """The tenant's rows; another purpose gives other rows of the same kind."""
        rng = random.Random(f"{SEED}/{self.name}/{purpose}")
        return (self.make_row(rng) for _ in range(self.num_rows))


TENANTS = (
    DemoTenant("arithmetic", arithmetic_row, 400),
    DemoTenant("support", support_row, 320),
    DemoTenant("code", code_row, 260),
    DemoTenant("meetings", meetings_row, 200),
)


def as_text(row: Row) -> str:
    """A row as plain text, for the tokenizer and for pre-training."""
    if "messages" in row:
        return "\n".join(message["content"] for message in row["messages"])
    return str(row["prompt"] + row["response"])
