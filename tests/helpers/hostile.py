"""Text of others that acts where it is not escaped, and pages as their readers see them."""

import json
from collections import Counter
from html.parser import HTMLParser

from hypothesis import strategies as st
from markdown_it import MarkdownIt

HOSTILE = (
    "a\n::add-mask::x\r::stop-commands::y \x1b]0;t\x07\x1b[2J\u202e ##[error]z <img src=x onerror=1> [l](javascript:1)"
    " <!-- ![i](http://h/p.png) `c` | d | @someone #12 https://h www.h &lt; ***b*** \x00\x0b\x85\u2028 [red]m[/]"
)  # fmt: skip

texts = st.text(max_size=60) | st.sampled_from([HOSTILE, "::error::", "##[x]", "- # 1. a", "]]>", "&#0;", "\ud800"[:0]])

BAD = f"</script><script>window.acted=1</script>{HOSTILE}\"' onclick=x {{{{ 7*7 }}}} </style></title>"

TAGS = {
    "html", "head", "meta", "link", "title", "style", "body", "header", "h1", "h2", "h3", "p", "div", "span", "code",
    "nav", "a", "noscript", "main", "section", "button", "i", "ul", "li", "abbr", "table", "thead", "tbody", "tr", "th",
    "td", "mark", "details", "summary", "dl", "dt", "dd", "footer", "script",
}  # fmt: skip

MARKDOWN = MarkdownIt("commonmark", {"html": True, "linkify": False}).enable("table")


class Page(HTMLParser):
    """What a browser makes of a page: its tags, attributes, and the text of each kind of element."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.said, self.inside = Counter(), [], {"text": "", "script": [], "style": ""}, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs
        self.inside = tag
        if tag == "script":
            self.said["script"].append("")

    def handle_endtag(self, _tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.said["script"][-1] += data
        else:
            self.said["style" if self.inside == "style" else "text"] += data

    @property
    def data(self):
        return json.loads(self.said["script"][0])


def tables(text):
    """Return the rows of every table that a reader of Markdown sees."""
    found, tokens = [], MARKDOWN.parse(text)
    for i, t in enumerate(tokens):
        if t.type == "table_open":
            found.append([])
        if t.type == "tr_open":
            found[-1].append([])
        if t.type == "inline" and tokens[i - 1].type in ("th_open", "td_open"):
            found[-1][-1].append("".join(c.content for c in t.children))
    return found
