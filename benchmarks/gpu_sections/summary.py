def summary(content, root): return ""
