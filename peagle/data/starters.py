"""Beginnings of user turns, by kind: the target continues one."""

from types import MappingProxyType

# Half of the chat turns have no beginning: the target writes all of the user's words.
CHAT = (
    *("",) * 20,
    "What", "Why do", "How do I", "How can I", "Explain", "Can you", "Could you help me",
    "I'm looking for", "I need", "Give me", "Tell me about", "Compare", "List", "Describe",
    "Write a short story about", "Write an email", "Summarize the following text:\n",
    "Rewrite the following", "Suggest", "What is the difference between",
)  # fmt: skip
CODE = (
    "Write a Python function that", "Write a Python function to", "Write a Python program that",
    "Write a Python class", "Write a Python script that", "Implement",
    "Complete the following Python function:\n```python\ndef",
    "Fix the bug in this Python code:\n```python\n",
    "What does this Python code do?\n```python\n", "Write unit tests for",
    "Optimize the following code:\n```python\n", "How do I use Python to",
    "In Python, how can I", "Write a JavaScript function that", "Write a C++ function that",
    "Write a Java method that", "Write a SQL query that", "Write a bash script that",
    "Write a regular expression that", "Given a list of integers, write a function that",
)  # fmt: skip
MATH = (
    "Solve the following math problem:", "What is the value of", "Find the", "Calculate the",
    "If x", "How many", "Solve for x:", "Simplify the expression", "A store sells", "A train",
    "The sum of", "What is the probability that", "In a class of", "The average of", "Let x be",
    "Evaluate the expression", "What is the area of", "What is the remainder when",
    "A rectangle has", "Prove that",
)  # fmt: skip
STARTERS = MappingProxyType({"chat": CHAT, "code": CODE, "math": MATH})
