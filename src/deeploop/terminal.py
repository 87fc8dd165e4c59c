"""Text of others on a terminal: what would move the cursor or change colours is shown, not obeyed."""


def printable(text: str, keep: str = "") -> str:
    """The text with control characters, and others that show nothing, as escapes; those in `keep` stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
