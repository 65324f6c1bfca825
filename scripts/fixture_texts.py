"""The words behind the SmolLM2 fixtures: prompts and two long texts, all written for this project."""

from __future__ import annotations

CHAT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def chat(question: str, system: str = CHAT_SYSTEM) -> str:
    """The model's own ChatML prompt for one question, control tokens spelled out."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


# One of each kind that has broken an engine before: prose, indentation, control tokens, bytes above ASCII, digits.
LOGIT_PROMPTS: dict[str, str] = {
    "english": "The old harbour was quiet in the morning, and the fishermen were already mending their nets when",
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "chat": chat("Name three things that float on water."),
    "multilingual": "Bonjour à tous! 你好，世界。Привет, мир! こんにちは 🌍🚀 naïve café, señor:",
    "digits": "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144,",
}

# Chosen from 43 candidates by the smallest lead of the top logit over 64 greedy steps. The first 17 keep a lead above
# 0.1 (lists, counting, copying: text of which the model is sure), so any sound float32 engine gives the same ids.
# The last 6 are ordinary prompts that meet near ties (0.08 down to 0.009): compare those while the margin is clear.
GREEDY_PROMPTS: dict[str, str] = {
    "log": "[INFO] step 1 done\n[INFO] step 2 done\n[INFO] step 3 done\n[INFO] step 4 done\n",
    "tens": "10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120,",
    "sql": "INSERT INTO t VALUES (1, 'a');\nINSERT INTO t VALUES (2, 'b');\nINSERT INTO t VALUES (3, 'c');\n",
    "count": "Counting up: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "refrain": "Row the boat, row the boat, row the boat, row the boat,",
    "binary": "0 1 0 1 0 1 0 1 0 1 0 1",
    "months": "January, February, March, April, May, June, July, August, September, October, November, December, "
    "January, February,",
    "roman": "Chapter I\nChapter II\nChapter III\nChapter IV\nChapter V\n",
    "chat-repeat": chat("Repeat the word hello twenty times."),
    "table": "| n | n*2 |\n|---|---|\n| 1 | 2 |\n| 2 | 4 |\n| 3 | 6 |\n| 4 | 8 |\n",
    "chat-count": chat("Count from 1 to 30."),
    "prayer": "Our Father, who art in heaven, hallowed be thy name;",
    "chat-hello": chat("Hello! Who are you?"),
    "lines": "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n13\n",
    "french": "un, deux, trois, un, deux, trois, un, deux, trois, un,",
    "capitals": "Paris is the capital of France. Berlin is the capital of Germany. Rome is the capital of",
    "emoji": "🌍🚀🌍🚀🌍🚀🌍🚀🌍🚀",
    "chat-france": chat("What is the capital of France?"),
    "harbour": "The old harbour was quiet in the morning, and",
    "chat-sky": chat("Why is the sky blue?"),
    "chat-python": chat("Write a Python function that adds two numbers."),
    "hamlet": "To be, or not to be, that is the question:",
    "chat-sum": chat("What is 2 + 2?"),
}

# Three whose answers end within 24 tokens, so that length penalty and early stopping matter, and two that run on.
BEAM_PROMPTS: dict[str, str] = {
    "yes-no": chat("Is water wet? Answer with one word."),
    "capital": chat("What is the capital of France?"),
    "translate": chat("Translate 'good morning' to Spanish."),
    "story": "Once upon a time, in a small village by the sea,",
    "code": "def add(a, b):\n    return",
}

# At least 512 tokens of plain expository English; the fixture keeps the first 512.
PROSE_TEXT = """\
A river begins as very little. High in the hills, rain sinks into the moss and the thin soil until it meets rock, and \
there it can go no deeper. It moves sideways instead, and somewhere on the slope it comes out again as a spring, cold \
and clear, no wider than a hand. If you followed it down, you would see a second spring join it, and then a third, and \
before the first mile was over you would have to look for stones in order to cross with dry feet.

Water does most of its work by carrying things. A slow stream can move only mud, but when its speed is doubled it can \
carry grains many times larger, and in a flood it rolls stones that no man could lift. The stones strike the bed and \
strike each other; their corners break off, and by the time they reach the plain they are round and smooth. What was \
broken from them becomes gravel, the gravel becomes sand, and the sand, in the end, becomes the fine brown silt that \
makes the fields beside the river the best in the country.

People noticed this long before anyone could explain it. The first towns were built where a river left its silt every \
spring, because there a family could grow more food than it needed. What was left over could be stored, or sold, or \
taken as a tax, and so there were soon merchants, and clerks who counted the sacks, and kings who owned the granaries. \
To count the sacks the clerks made marks in wet clay. Those marks are the oldest writing that we have, and most of \
them are not poems or prayers but lists: so many jars of oil, so many sheep, so many days of work.

On the plain the river slows down, and because it is slow it begins to wander. On the outside of every bend the \
current is quick and eats into the bank; on the inside it is lazy and drops its sand. In this way a small curve grows \
into a large one, year after year, until the river has made a loop so wide that only a narrow neck of land remains. \
Then, in one wet winter, the water breaks through the neck and takes the shorter way. The old loop is left behind as a \
quiet lake in the shape of a new moon, where reeds grow and herons stand in the shallows.

At last the river meets the sea. Here the current stops, and everything that it still carries sinks to the bottom. \
The mud builds up into banks, the banks become islands, and the river must divide in order to pass between them. Seen \
from above, the many small channels look like the branches of a tree, or like the springs in the hills where the whole \
journey started, only the other way around.
"""

# What an instruct model meets every day: control tokens, lists, code. Far more predictable than the prose above.
CHAT_TEXT = (
    chat("What is the water cycle?")
    + """\
The water cycle is the continuous movement of water on, above, and below the surface of the Earth. It is driven by the \
energy of the sun. The main stages of the water cycle are:

1. **Evaporation**: The sun heats the water in oceans, lakes, and rivers, and the water turns into water vapor.
2. **Condensation**: The water vapor rises into the atmosphere, cools, and turns into tiny droplets of water, which \
form clouds.
3. **Precipitation**: When the droplets become too heavy, they fall back to the ground as rain, snow, or hail.
4. **Runoff**: The water flows over the land into rivers and lakes, and finally back to the ocean.

The water cycle is important because it provides fresh water for plants, animals, and people.<|im_end|>
<|im_start|>user
Write a Python function that returns the largest number in a list.<|im_end|>
<|im_start|>assistant
Here is a Python function that returns the largest number in a list:

```python
def find_largest(numbers):
    if not numbers:
        return None
    largest = numbers[0]
    for number in numbers:
        if number > largest:
            largest = number
    return largest
```

You can use the function like this:

```python
numbers = [1, 2, 3, 4, 5]
print(find_largest(numbers))  # Output: 5
```

The function first checks if the list is empty. If the list is empty, it returns `None`. Otherwise, it sets the \
largest number to the first number in the list. Then it goes through the list and compares each number with the \
largest number. If the number is greater than the largest number, it updates the largest number. Finally, it returns \
the largest number.<|im_end|>
<|im_start|>user
What are the planets of the solar system?<|im_end|>
<|im_start|>assistant
The planets of the solar system, in order of their distance from the sun, are:

1. Mercury
2. Venus
3. Earth
4. Mars
5. Jupiter
6. Saturn
7. Uranus
8. Neptune

Mercury, Venus, Earth, and Mars are the inner planets. They are small and rocky. Jupiter, Saturn, Uranus, and Neptune \
are the outer planets. Jupiter and Saturn are gas giants, and Uranus and Neptune are ice giants.<|im_end|>
"""
)
