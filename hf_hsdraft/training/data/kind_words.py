"""Words that are drawn for the `{slots}` of prompts, see `kinds`. A word may hold slots itself."""

from __future__ import annotations

WORDS: dict[str, tuple[str, ...]] = {
    "topic": ("{aspect} of {thing}", "{aspect} of {thing} {setting}", "{thing} {setting}", "{activity} {setting}"),
    "aspect": (
        "the history", "the daily use", "the cost", "the future", "the science", "the care", "the invention",
        "the problems", "the beauty", "the making", "the trade", "the safety", "the names and kinds", "the first years",
    ),
    "thing": (
        "bicycles", "lighthouses", "bread", "volcanoes", "chess", "coffee", "glass", "libraries", "honey bees", "maps",
        "railways", "vaccines", "the violin", "whales", "solar panels", "paper", "football", "cheese", "satellites",
        "elections", "rice", "bridges", "antibiotics", "perfume", "theatre", "rivers", "microchips", "silk", "dogs",
        "weather forecasts", "passports", "earthquakes", "comic books", "batteries", "gardens", "the stock market",
        "sleep", "film music", "wind turbines", "cats", "wheat", "photography", "hospitals", "salt", "drones",
        "public parks", "running shoes", "ancient coins", "insurance", "coral reefs", "tea", "robots", "cement",
        "kitchen knives", "the moon", "video games", "old towns", "mushrooms", "electric cars", "handwriting",
    ),
    "setting": (
        "in a small town", "in Japan", "for beginners", "in the nineteenth century", "at school", "in large cities",
        "in India", "on a small budget", "in winter", "for families", "by the sea", "in Brazil", "at work",
        "for older people", "in the desert", "in Italy", "in the mountains", "after the war", "in Kenya", "at home",
        "without electricity", "for children", "in hot summers", "in Norway", "next to a busy road", "in space",
    ),
    "activity": (
        "learning a language", "moving house", "growing vegetables", "planning a wedding", "starting a shop",
        "training for a race", "writing a diary", "raising chickens", "travelling by train", "repairing old furniture",
        "saving money", "cooking for guests", "applying for a job", "looking after a pet", "playing in a band",
        "teaching mathematics", "painting a room", "organising a library", "losing weight", "watching birds",
    ),
    "language": (
        "French", "Spanish", "German", "Italian", "Portuguese", "Dutch", "Polish", "Swedish", "Turkish", "Russian",
        "Chinese", "Japanese", "Korean", "Arabic", "Hindi", "Indonesian",
    ),
    "programming": (
        "Python", "Python", "Python", "JavaScript", "TypeScript", "Java", "C", "C++", "Go", "Rust", "SQL", "Bash",
    ),
    "task": (
        "removes duplicates from a list but keeps the order", "counts the words of a text file",
        "checks whether a string is a palindrome", "merges two sorted lists", "parses a date such as 2024-03-09",
        "finds the longest common prefix of some strings", "computes the moving average of numbers",
        "groups records by a key", "validates an e-mail address", "reverses the words of a sentence",
        "finds the largest sum of neighbouring numbers", "converts Roman numerals to integers",
        "prints a multiplication table", "caches the results of a slow function", "reads a CSV file and sums a column",
        "searches a sorted array", "rotates a matrix", "flattens nested lists", "generates a random password",
        "retries a web request with growing pauses", "computes the factorial of a number", "sorts people by age",
        "splits a bill between friends", "finds the shortest path in a grid", "formats a number of bytes for people",
        "checks whether brackets are balanced", "simulates a queue with two stacks", "draws a triangle of stars",
        "removes old files from a folder", "counts how often each letter occurs",
    ),
    "genre": (
        "a news article", "an encyclopedia entry", "a blog post", "a letter to the editor", "a short report",
        "a travel guide entry", "a product description", "an essay", "a speech", "a lecture for students",
    ),
    "message": (
        "an e-mail to a colleague", "an e-mail to a customer", "a complaint to a company", "a job application",
        "an invitation", "a note to neighbours", "a thank-you letter", "an announcement to a team",
    ),
    "opinion": (
        "a happy review", "an angry review", "a review that is neither good nor bad", "a short comment",
        "a message to customer support", "a social media post",
    ),
    "facts": (
        "a paragraph with names, dates and places", "a report of a meeting with names and tasks",
        "an order with articles, numbers and prices", "a profile of an invented person",
        "a timetable in sentences", "a recipe in sentences", "a police report of an invented case",
        "a comparison of three products with their prices",
    ),
    "fields": (
        '"name", "date" and "place"', '"title", "people" and "topics"', '"item", "amount" and "price"',
        '"who", "what" and "when"', '"subject", "problem" and "next_step"',
    ),
    "style": (
        "formal", "friendly", "simple", "persuasive", "funny", "polite", "shorter", "more precise", "old-fashioned",
        "enthusiastic", "neutral", "clearer",
    ),
    "reader": (
        "a child of ten", "an expert", "a busy manager", "somebody who learns English", "a new colleague",
        "a grandparent", "a visitor from abroad", "a student",
    ),
    "role": (
        "a patient teacher", "a pirate captain", "a job interviewer", "a doctor", "a detective of the 1920s",
        "a travel agent", "a chess coach", "a grumpy shopkeeper", "a museum guide", "a lawyer", "a fitness trainer",
        "an astronaut", "a medieval knight", "a cook in a small restaurant", "a helpful librarian", "a philosopher",
    ),
    "form": (
        "a short story", "a poem", "a dialogue", "a fairy tale", "a song text", "a speech", "a scene of a play",
        "a diary entry", "a limerick", "an advertisement", "a blog post",
        "a newspaper headline and its first paragraph",
    ),
    "few": ("two", "three", "four", "five"),
    "number": tuple(str(number) for number in range(3, 98)),
    "second_number": tuple(str(number) for number in range(2, 60)),
    "third_number": tuple(str(number) for number in range(2, 25)),
    "person": (
        "Amina", "Bruno", "Clara", "David", "Elif", "Farid", "Grace", "Hana", "Ivan", "Julia", "Kofi", "Lena", "Mateo",
        "Nora", "Omar", "Priya", "Rosa", "Sven", "Tariq", "Yuki",
    ),
    "goods": ("apples", "books", "stamps", "bottles", "tickets", "eggs", "pencils", "chairs", "kilograms of rice",
    "tiles"),
    # These go beside the words above, and never are the same.
    "other_thing": ("windmills", "chocolate", "typewriters", "owls", "canals", "newspapers", "ice hockey", "pianos"),
    "other_language": ("English", "Greek", "Vietnamese", "Czech", "Danish", "Hungarian", "Thai"),
    "other_person": ("Anton", "Bela", "Chen", "Dora", "Emil", "Fatima", "George", "Ines", "Karim", "Maria", "Pavel"),
    "other_role": ("your guest", "a tourist", "your new pupil", "a customer", "a reporter", "your neighbour"),
    "programming_goal": ("Ruby", "Kotlin", "C#", "Swift", "PHP", "Lua", "R", "Haskell"),
}  # fmt: skip
