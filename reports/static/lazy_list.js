// A list that makes its rows as they come into sight: five thousand cost no more than the first screenful.

class LazyList {
  constructor(holder, makeRow, chunk = 40) {
    this.holder = holder;
    this.makeRow = makeRow;
    this.chunk = chunk;
    this.items = [];
    this.made = 0;
    this.end = element("div", { class: "end", "aria-hidden": "true" });
    this.watcher = new IntersectionObserver((seen) => seen.some((entry) => entry.isIntersecting) && this.more(), {
      rootMargin: "600px",
    });
  }

  show(items) {
    this.watcher.disconnect();
    this.items = items;
    this.made = 0;
    this.holder.replaceChildren(this.end);
    this.more();
    this.watcher.observe(this.end);
  }

  // An observer reports changes only; so it is asked anew, in case the end is still in sight.
  more(upTo = this.made + this.chunk) {
    const rows = document.createDocumentFragment();
    const last = Math.min(upTo, this.items.length);
    for (; this.made < last; this.made++) rows.append(this.makeRow(this.items[this.made]));
    this.end.before(rows);
    if (this.made === this.items.length) {
      this.watcher.disconnect();
      this.end.remove();
    } else {
      this.watcher.unobserve(this.end);
      this.watcher.observe(this.end);
    }
  }
}
