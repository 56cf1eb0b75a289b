// The last two minutes of a device, stacked by kind, as a small drawing; in words, between what bounds its memory was held.
import { attribute, bytes, el } from "./dom.js";

const SPAN_S = 120;
const KINDS = ["private", "weights", "used", "cached", "reserve"];

export class History {
  constructor(device) {
    this.canvas = el("canvas", { class: "history", role: "img" });
    this.device = device;
    this.samples = [];
  }

  add(sizes, capacity) {
    const now = performance.now() / 1000;
    this.samples.push({ at: now, sizes, capacity });
    while (this.samples[0].at < now - SPAN_S) this.samples.shift();
    const held = this.samples.map((sample) => Object.values(sample.sizes).reduce((sum, size) => sum + size));
    const bounds = `${bytes(Math.min(...held))} and ${bytes(Math.max(...held))}`;
    attribute(this.canvas, "aria-label", `${this.device}: between ${bounds} were held in the last two minutes`);
  }

  draw() {
    const width = this.canvas.clientWidth * devicePixelRatio;
    const height = this.canvas.clientHeight * devicePixelRatio;
    if (!width) return;
    if (this.canvas.width !== width) this.canvas.width = width;
    if (this.canvas.height !== height) this.canvas.height = height;
    const pen = this.canvas.getContext("2d");
    const style = getComputedStyle(this.canvas);
    const now = performance.now() / 1000;
    const x = (at) => width * (1 - (now - at) / SPAN_S);
    pen.clearRect(0, 0, width, height);
    const base = this.samples.map(() => height);
    for (const kind of KINDS) {
      pen.fillStyle = style.getPropertyValue(`--kind-${kind}`);
      this.samples.forEach((sample, i) => {
        // Steps: what was seen holds until the next look, but not over a gap.
        const end = Math.min(this.samples[i + 1]?.at ?? now, sample.at + 3);
        const size = (height * (sample.sizes[kind] ?? 0)) / sample.capacity;
        base[i] -= size;
        pen.fillRect(x(sample.at), base[i], x(end) - x(sample.at) + 0.5, size);
      });
    }
  }
}
