"""The words and sentences that conversations are made of."""


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = words(
    """amber misty quiet silver golden hidden crimson gentle lonely frozen sunny brave clever distant humble
    icy jolly kindly lucky mellow noble odd pale rapid salty tidy velvet wild young zesty proud dusty"""
)
NOUNS = words(
    """falcon harbor river lantern meadow otter castle comet garden island kettle ladder market needle orchard
    pebble quarry rabbit saddle temple umbrella valley window anchor bridge candle dragon engine forest
    glacier hammer violin"""
)
PREAMBLES = (
    "You keep the notes.",
    "You are the keeper of the codes.",
    "Answer from these notes.",
    "Here are the notes of the day.",
    "You look up codes for the crew.",
)
WHO = ("The baker", "The gardener", "The old captain", "A small cat", "The night watch", "The painter", "Our neighbor")
DOES = (
    "hums a slow song",
    "waters the roses",
    "paints the door blue",
    "sleeps near the stove",
    "counts the boats",
    "reads a long letter",
    "brings warm bread",
    "waits for the rain",
)
WHEN = ("at dawn", "before noon", "in the evening", "on Sunday", "by the sea", "under the stars", "after lunch")
ASK_ONE = (
    "What is the code of {}?",
    "Which code does {} have?",
    "Tell me the code of {}.",
    "Please give me the code of {}.",
    "I need the code of {}.",
)
ASK_AGAIN = ("And the code of {}?", "And {}?", *ASK_ONE)
ASK_MANY = (
    "List the codes of {}.",
    "What are the codes of {}?",
    "Please give me the codes of {}.",
    "Tell me the codes of {}.",
)
TELL = ("Please note this. {}", "{} Please remember it.", "One more note. {}")
GREETINGS = (
    "Hello", "Hi", "Hi there", "Hello there", "Hey", "Hey there", "Good morning", "Good evening", "Good day",
    "Greetings", "Who are you", "What are you", "What can you do", "Help", "Help me", "How are you", "What do you do",
    "Who made you", "How does this work", "Hello, who are you", "Hello! What can you do", "Hi! How are you",
    "Start", "Test", "Ping",
)  # fmt: skip
THANKS = ("Thanks", "Thank you", "Thank you very much", "Many thanks", "Great", "Nice", "Well done", "Bye", "OK")
OPENERS = (
    "What is", "Who is", "Where is", "Tell me about", "Can you write", "Do you like", "Why is", "Explain", "How is",
    "Write", "Give me", "Please", "I want", "My", "The code of", "What is the code of", "When", "Is", "Sing",
)  # fmt: skip
THINGS = words(
    """the weather capital of France a poem meaning life your name story about sky so blue two plus music best soup joke
    time love Paris number how to cook rice moon some code this news today my bike house car red door key phone dog
    python function sum list world president water recipe travel book film word translate English German math
    2+2 17 + 5 = 3 * 4 1000 you me it is in on and not for with from be big good new"""
)
GREETING_ANSWER = (
    "Hello! I am a very small model that looks up codes. Tell me some notes, such as: The code of amber falcon is 4719."
    " Then ask me: What is the code of amber falcon?"
)
OTHER_ANSWER = "I only look up codes in notes. Ask me: What is the code of amber falcon?"
THANKS_ANSWER = "You are welcome."
NOTED_ANSWER = "Noted."
