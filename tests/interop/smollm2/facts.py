"""A hundred questions of choice and forty of completion for lm-eval, since its own tasks come from the
hub."""

import json

CAPITALS = """France Paris, Italy Rome, Spain Madrid, Germany Berlin, Norway Oslo, Sweden Stockholm, Denmark Copenhagen,
Finland Helsinki, Poland Warsaw, Austria Vienna, Hungary Budapest, Greece Athens, Portugal Lisbon, Ireland Dublin,
Belgium Brussels, Russia Moscow, Turkey Ankara, Egypt Cairo, Kenya Nairobi, Ghana Accra, Japan Tokyo, China Beijing,
Thailand Bangkok, Vietnam Hanoi, Nepal Kathmandu, Iran Tehran, Iraq Baghdad, Cuba Havana, Peru Lima, Chile Santiago,
Canada Ottawa, Jamaica Kingston, Iceland Reykjavik, Bulgaria Sofia, Romania Bucharest, Serbia Belgrade, Croatia Zagreb,
Indonesia Jakarta, Colombia Bogota, Venezuela Caracas"""
OPPOSITES = """hot cold, big small, up down, left right, day night, black white, good bad, fast slow, hard soft, wet dry,
rich poor, young old, open closed, full empty, light dark, early late, high low, long short, happy sad, strong weak,
near far, first last, push pull, buy sell, win lose, true false, love hate, war peace, north south, inside outside"""
KINDS = """apple fruit, dog animal, hammer tool, rose flower, oak tree, red colour, piano instrument, salmon fish,
eagle bird, gold metal, shirt clothing, chess game, car vehicle, ant insect, Monday day, July month, doctor profession,
milk drink, rice grain, carrot vegetable, football sport, diamond gem, square shape, France country, Thames river,
English language, chair furniture, knife weapon, oxygen gas, Mars planet"""

TASKS = {
    "facts": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "capitals": """output_type: generate_until
doc_to_text: "The capital of Scotland is Edinburgh.\\nThe capital of {{country}} is"
doc_to_target: "{{capital}}"
generation_kwargs: {until: [".", ",", "\\n"], max_gen_toks: 12}
filter_list: [{name: none, filter: [{function: remove_whitespace}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
""",
}


def pairs(table):
    return [tuple(pair.split()) for pair in table.split(",")]


def questions():
    """Each with its answer and three others of its table, the answer at another place each time."""
    forms = [
        (CAPITALS, "The capital of {} is"),
        (OPPOSITES, "The opposite of {} is"),
        (KINDS, "The word {} names a kind of"),
    ]
    for table, form in forms:
        known = pairs(table)
        for index, (word, answer) in enumerate(known):
            others = [known[(index + step) % len(known)][1] for step in [3, 7, 11]]
            place = index % 4
            yield {"question": form.format(word), "choices": [*others[:place], answer, *others[place:]], "answer": place}


def write(folder):
    """The tasks as lm-eval reads them."""
    capitals = [{"country": country, "capital": capital} for country, capital in pairs(CAPITALS)]
    for name, lines in {"facts": list(questions()), "capitals": capitals}.items():
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, lines)))
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + TASKS[name])
