"""Links to the glossary: the first use of each of its words on a page leads to its row."""

import re

EVERYDAY = {
    *("collapse", "decay, strength", "growth", "load", "moment", "owner", "remainder", "sample"),
    *("shadow", "slice", "tied", "time step", "to count"),
}
"""Words of the glossary that pages also use in their everyday meaning: they get no link."""
ROW = re.compile(r"^\| ([^|`]+?) \|", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
NOT_PROSE = re.compile(r"(`[^`]*`|!?\[[^\]]*\]\([^)]*\)|\*\*[^*]*\*\*)")


def words_of(glossary: str) -> list[str]:
    """Return the words of the table "Words" that get links, the longest first."""
    words = ROW.findall(_words_section(glossary))[1:]
    return sorted(set(words) - EVERYDAY, key=lambda word: (-len(word), word))


def with_anchors(glossary: str) -> str:
    """Return the glossary with an anchor at each word that gets links."""
    section = _words_section(glossary)
    words = words_of(glossary)

    def anchored(found: re.Match[str]) -> str:
        word = found[1]
        return f"| [{word}]{{#{_anchor(word)}}} |" if word in words else found[0]

    return glossary.replace(section, ROW.sub(anchored, section))


def with_links(page: str, words: list[str], glossary: str) -> str:
    """Return a page with a link at the first use of each word in its prose.

    words: the longest first, so that a word within a longer one gets no link of its own there.
    glossary: the path of the glossary from the page.
    """
    blocks = list[str]()
    left = list(words)
    for part in FENCED.split(page):
        if part.startswith("```"):
            blocks.append(part)
            continue
        # code and links may go on in the next line, but not beyond an empty one
        for block in re.split(r"(\n\n+)", part):
            is_prose = not block.startswith(("#", "|", "    "))
            blocks.append(_linked(block, left, glossary) if is_prose else block)
    return "".join(blocks)


def _linked(block: str, left: list[str], glossary: str) -> str:
    """Return a block of prose with its links, and take the words that got one from `left`."""
    for word in list(left):
        # all but every second part is prose; links of longer words are not
        parts = NOT_PROSE.split(block)
        for number in range(0, len(parts), 2):
            link = rf"[\1]({glossary}#{_anchor(word)})"
            pattern = rf"(?<![\w-])({re.escape(word)}s?)(?![\w-])"
            parts[number], count = re.subn(pattern, link, parts[number], count=1)
            if count:
                left.remove(word)
                block = "".join(parts)
                break
    return block


def _words_section(glossary: str) -> str:
    return glossary.partition("## Words\n")[2].partition("\n#")[0]


def _anchor(word: str) -> str:
    return "word-" + re.sub(r"[^a-z0-9]+", "-", word.lower())
