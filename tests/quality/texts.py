"""Public-domain text for training, calibration and evaluation: the Bible in three translations.

Every 200th chapter is for evaluation only, in all translations. Calibration reads the one after each, which the
models have not seen, and three more of every 200, which they were trained on.
kjv-4m is calibrated on verses and evaluated on those that its training left out, in its own template.

    texts.py FOLDER
"""

import json
import sys
from pathlib import Path

KJV_4M = Path(__file__).resolve().parents[1] / "data/kjv-4m"
BOOKS = 66
TRANSLATIONS = {"kjv": "KING_JAMES", "asv": "AMERICAN_STANDARD", "ylt": "YOUNGS"}


def chapters():
    """Verses by chapter: {(translation, chapter number): [(reference, text)]}."""
    import pythonbible as bible

    found = {}
    numbers = {}
    for verse in bible.verses.VERSE_IDS:
        # Books of which only some translations have a text come after these.
        if verse // 1_000_000 > BOOKS:
            continue
        book, chapter, number = bible.get_book_chapter_verse(verse)
        place = numbers.setdefault((book, chapter), len(numbers))
        name = "".join(book.title.removesuffix(" of Songs").split())
        for translation, version in TRANSLATIONS.items():
            try:
                text = bible.get_verse_text(verse, version=getattr(bible.Version, version))
            except bible.errors.VersionMissingVerseError:
                # Translations leave out verses that others have.
                continue
            text = " ".join(text.replace("[", "").replace("]", "").split())
            if text:
                found.setdefault((translation, place), []).append((f"{name} {chapter}:{number}", text))
    return found


def prose(verses):
    return " ".join(text for _, text in verses) + "\n"


def conversation(verses):
    return "".join(
        f"<|im_start|>user\n{reference}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
        for reference, text in verses
    )


def write(folder):
    """Writes {kjv,prose}-{calibration,evaluation}.txt and prose-training.txt, unless they are there."""
    if (folder / "prose-training.txt").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"training": [], "calibration": [], "evaluation": []}
    kjv = []
    held = json.loads((KJV_4M / "heldout.json").read_text())
    held_references = {verse["reference"] for verse in held}
    for (translation, place), verses in sorted(chapters().items(), key=lambda it: (it[0][1], it[0][0])):
        part = {0: "evaluation", 1: "calibration"}.get(place % 200, "training")
        parts[part].append(prose(verses))
        if place % 200 in (51, 101, 151):
            parts["calibration"].append(prose(verses))
        if translation == "kjv":
            kjv += [verse for verse in verses if verse[0] not in held_references]
    (folder / "kjv-evaluation.txt").write_text(conversation([(it["reference"], it["text"]) for it in held]))
    (folder / "kjv-calibration.txt").write_text(conversation(kjv[7::10]))
    for part in ("evaluation", "calibration", "training"):
        (folder / f"prose-{part}.txt").write_text("".join(parts[part]))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
