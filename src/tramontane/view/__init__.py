"""`tramontane view`: a local page that shows run folders; see docs/view.md.

`server` runs the page, `app` answers its requests, and the other modules read one kind of data
each: `runs` configs and logs, `rollouts` and `search` the narrow columns and texts of rollouts,
`tokens` single completions, `answers` completions by problem, `timeline` the workers' activities.
Everything is read-only. The folder `static` is the page itself.
"""
