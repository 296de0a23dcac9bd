"""What happened to a graph on its way through the compiler: pages to look at, and the life of one value.

`study.py` collects, `document.py` and `diff_document.py` make the JSON of a page, `page.py` the file,
`life.py` and `life_text.py` answer `rewright explain`. docs/ir.md describes the JSON.
"""
