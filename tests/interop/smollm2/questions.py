"""Twenty questions, each with a tool of its own whose schema has another shape, and four schemas for
whole answers."""


def shape(required=None, **properties):
    """An object's schema; without `required` everything is."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


TEXT, WHOLE, NUMBER, FLAG = ({"type": kind} for kind in ["string", "integer", "number", "boolean"])


def one_of(*values):
    return {"type": "string", "enum": list(values)}


def many(items, least, most):
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def tool(name, description, parameters):
    return {"name": name, "description": description, "parameters": parameters}


POINT = shape(x=NUMBER, y=NUMBER)
DAY = {"type": "string", "format": "date"}
CODE = {"type": "string", "pattern": "^[A-Z]{3}$"}
LINE = shape(from_={"$ref": "#/$defs/point"}, to={"$ref": "#/$defs/point"}) | {"$defs": {"point": POINT}}
AMOUNT = {"type": "number", "minimum": 0, "maximum": 1000}
PERSON = shape(name=TEXT)
TREE = shape(root=shape(name=TEXT, children=many(PERSON, 0, 3)))

QUESTIONS = [
    ("What is the weather in Paris?", tool("get_weather", "Weather of a city.", shape(city=TEXT))),
    ("Set the lamp to red.", tool("set_lamp", "Change a lamp.", shape(colour=one_of("red", "green", "blue")))),
    ("What is 12 plus 30?", tool("add", "Add two whole numbers.", shape(a=WHOLE, b=WHOLE))),
    ("Turn the heating on.", tool("switch", "Turn a device on or off.", shape(device=TEXT, on=FLAG))),
    ("Put milk, bread and eggs on my list.", tool("add_items", "Extend a shopping list.", shape(items=many(TEXT, 1, 5)))),
    ("Book a table for four on 2024-05-17.", tool("book", "Book a table.", shape(day=DAY, people=WHOLE))),
    ("Convert 20 euros to dollars.", tool("convert", "Convert money.", shape(amount=AMOUNT, to=CODE))),
    ("Draw a line from (0, 0) to (3, 4).", tool("draw_line", "Draw a line.", LINE)),
    ("Mark the point 2, 5.", tool("mark", "Mark a point.", shape(point=POINT, label={"type": ["string", "null"]}))),
    ("Remind me in ten minutes.", tool("remind", "Set a timer.", shape(minutes={"type": "integer", "minimum": 1, "maximum": 600}))),
    ("Send Ann the message hello.", tool("send", "Send a message.", shape(["to", "text"], to=TEXT, text=TEXT, urgent=FLAG))),
    ("Search for books by Jane Austen.", tool("search", "Search books.", shape([], author=TEXT, title=TEXT, year=WHOLE))),
    ("Play some jazz, quietly.", tool("play", "Play music.", shape(genre=one_of("jazz", "rock", "folk"), volume={"type": "integer", "minimum": 0, "maximum": 10}))),
    ("Who leads the team? Show the tree.", tool("show_tree", "Show a tree of people.", TREE)),
    ("Translate good morning into French.", tool("translate", "Translate a text.", shape(text=TEXT, language=one_of("fr", "de", "it")))),
    ("Open the door or call the porter.", tool("act", "Do one thing.", shape(action={"anyOf": [shape(open=TEXT), shape(call=TEXT)]}))),
    ("Store the version 1.2.3.", tool("store", "Store a version.", shape(version={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"}))),
    ("Rate this film with four stars.", tool("rate", "Rate a film.", shape(stars={"type": "integer", "enum": [1, 2, 3, 4, 5]}))),
    ("Make the matrix of ones, two by two.", tool("matrix", "Make a matrix.", shape(rows=many(many(NUMBER, 2, 2), 2, 2)))),
    ("What time is it?", tool("now", "The time.", shape())),
]

OBJECTS = [
    ("It is 21 degrees in Rome. Give city and degrees.", shape(city=TEXT, degrees=WHOLE)),
    ("Name two colours.", shape(colours=many(one_of("red", "green", "blue", "black"), 2, 2))),
    ("Ann is 30 and lives in Oslo.", shape(person=shape(name={"type": "string", "maxLength": 20}, age=WHOLE))),
    ("Is the sky blue?", shape(answer=FLAG, certainty={"type": "number", "minimum": 0, "maximum": 1})),
]
