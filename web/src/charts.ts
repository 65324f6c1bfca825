// Pictures on canvas: the timeline, the cache map, and uPlot's lines in the page's colours.

import uPlot from "uplot";
import type { BlockUse, StateUse, Step } from "./types.js";
import { isPrefill } from "./export.js";

export function colour(name: string): string {
  // A custom property may hold light-dark(); the colour that a canvas understands is that of an element that uses it.
  const probe = document.createElement("span");
  probe.style.setProperty("color", `var(--${name})`);
  probe.hidden = true;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** A canvas that is as sharp as the screen, and its context in CSS pixels. */
function prepare(canvas: HTMLCanvasElement, height: number): CanvasRenderingContext2D | null {
  const width = canvas.parentElement?.clientWidth ?? 600;
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.setProperty("width", `${width}px`);
  canvas.style.setProperty("height", `${height}px`);
  const context = canvas.getContext("2d");
  context?.scale(ratio, ratio);
  context?.clearRect(0, 0, width, height);
  return context;
}

export interface Lane { request: number; isMine: boolean; works: { start: number; end: number; isPrefill: boolean; tokens: number }[] }

export function lanes(steps: readonly Step[], mine: ReadonlySet<number>): Lane[] {
  const found = new Map<number, Lane>();
  for (const step of steps)
    for (const work of step.works) {
      let lane = found.get(work.request);
      if (!lane) found.set(work.request, (lane = { request: work.request, isMine: mine.has(work.request), works: [] }));
      lane.works.push({ start: step.start, end: step.start + step.seconds, isPrefill: isPrefill(work), tokens: work.tokens });
    }
  return [...found.values()].sort((a, b) => a.request - b.request);
}

export interface Latency { first: number | null; gaps: number[]; pauses: { at: number; seconds: number; request: number }[] }

/** Of one request, by the engine's own clock: until its first token, between tokens, and the pauses between them in which
 * another request's prompt was read. */
export function latency(steps: readonly Step[], request: number): Latency {
  const mine = steps.filter((step) => step.works.some((work) => work.request === request));
  const choosing = mine.filter((step) => step.works.some((work) => work.request === request && work.samples > 0));
  const ends = choosing.map((step) => step.start + step.seconds);
  const begin = mine[0]?.start ?? null;
  const first = begin === null || ends[0] === undefined ? null : ends[0] - begin;
  const gaps = ends.slice(1).map((end, index) => end - (ends[index] ?? end));
  const usual = [...gaps].sort((a, b) => a - b)[gaps.length >> 1] ?? 0;
  const pauses = gaps.flatMap((gap, index) => {
    if (gap < 1.5 * usual) return [];
    const from = ends[index] ?? 0;
    const to = ends[index + 1] ?? from;
    const guilty = steps.filter((step) => step.start < to && step.start + step.seconds > from).flatMap((step) => step.works)
      .find((work) => work.request !== request && isPrefill(work) && work.tokens > 1);
    return guilty ? [{ at: from, seconds: gap, request: guilty.request }] : [];
  });
  return { first, gaps, pauses };
}

const LANE = 16;
const MOST_LANES = 24;

export function drawTimeline(canvas: HTMLCanvasElement, all: Lane[], from: number, to: number): void {
  const inside = all.filter((lane) => lane.works.some((work) => work.end > from && work.start < to));
  const others = inside.filter((lane) => !lane.isMine).slice(-Math.max(4, MOST_LANES - inside.filter((lane) => lane.isMine).length));
  const shown = inside.filter((lane) => lane.isMine || others.includes(lane)).slice(-2 * MOST_LANES);
  const height = Math.max(4, shown.length) * LANE + 22;
  const context = prepare(canvas, height);
  if (!context) return;
  const width = canvas.parentElement?.clientWidth ?? 600;
  const left = 54;
  const scale = (width - left - 8) / Math.max(1e-9, to - from);
  const [text, line, prefill, decode, other] = ["muted", "line", "prefill", "decode", "other"].map(colour);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  shown.forEach((lane, row) => {
    const y = row * LANE;
    context.fillStyle = text ?? "";
    context.fillText(`#${lane.request}`, 6, y + LANE / 2);
    for (const work of lane.works) {
      if (work.end < from || work.start > to) continue;
      const x = left + Math.max(0, work.start - from) * scale;
      const w = Math.max(1, (Math.min(to, work.end) - Math.max(from, work.start)) * scale);
      context.fillStyle = (work.isPrefill ? prefill : lane.isMine ? decode : other) ?? "";
      context.fillRect(x, y + 3, w, LANE - 6);
    }
  });
  context.strokeStyle = line ?? "";
  context.fillStyle = text ?? "";
  const base = height - 18;
  context.beginPath();
  context.moveTo(left, base);
  context.lineTo(width - 8, base);
  context.stroke();
  const ticks = width < 480 ? 2 : 4;
  for (let tick = 0; tick <= ticks; tick++) {
    const x = left + ((width - left - 8) * tick) / ticks;
    const label = `${(((to - from) * tick) / ticks).toFixed(2)} s`;
    context.fillText(label, Math.min(x, width - 8 - context.measureText(label).width), base + 10);
  }
}

/** The colour of each use. A state that one request holds is as private as a block; a snapshot is kept as cached ones are. */
export const COLOURS: Record<BlockUse | StateUse, string> = {
  free: "block-free", cached: "block-cached", private: "block-private", shared: "block-shared", held: "block-private", snapshot: "block-cached",
};

/** Blocks or states in order, each a square in the colour of its use; `ours` are outlined. */
export function drawUses(canvas: HTMLCanvasElement, map: readonly [BlockUse | StateUse, number][], ours: ReadonlySet<number>): void {
  const width = canvas.parentElement?.clientWidth ?? 600;
  const all = map.reduce((sum, [, length]) => sum + length, 0);
  const size = all > 4096 ? 5 : all > 1024 ? 8 : 12;
  const columns = Math.max(1, Math.floor(width / size));
  const height = Math.ceil(all / columns) * size;
  const context = prepare(canvas, height);
  if (!context) return;
  const outline = colour("text");
  let place = 0;
  for (const [use, length] of map) {
    context.fillStyle = colour(COLOURS[use]);
    for (const end = place + length; place < end; place++) {
      const x = (place % columns) * size;
      const y = Math.floor(place / columns) * size;
      context.fillRect(x, y, size - 1, size - 1);
      if (!ours.has(place)) continue;
      context.strokeStyle = outline;
      context.strokeRect(x + 0.5, y + 0.5, size - 2, size - 2);
    }
  }
}

export interface Line { name: string; colour: string; values: (number | null)[] }

export class Chart {
  readonly node = document.createElement("div");
  private plot: uPlot | null = null;
  private seen = "";

  constructor(private readonly unit: string, private readonly height = 180) {
    this.node.className = "chart";
    this.node.setAttribute("aria-hidden", "true");
  }

  draw(times: number[], lines: Line[]): void {
    const width = this.node.clientWidth;
    if (!width || !times.length) return;
    const data = [times, ...lines.map((line) => line.values)] as uPlot.AlignedData;
    const kind = `${width} ${document.documentElement.dataset["theme"] ?? ""} ${lines.map((line) => line.name).join()}`;
    if (this.plot && kind === this.seen) {
      this.plot.setData(data);
      return;
    }
    this.seen = kind;
    this.plot?.destroy();
    const [text, grid] = [colour("muted"), colour("line")];
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot(
      {
        width,
        height: this.height,
        scales: { x: { time: false }, y: { range: (_, __, most) => [0, Math.max(most * 1.1, 1e-3)] } },
        axes: [{ ...axis, size: 30, values: (_, ticks) => ticks.map((tick) => `${tick.toFixed(1)} s`) }, { ...axis, size: 68, values: (_, ticks) => ticks.map((tick) => `${+tick.toPrecision(3)}${this.unit}`) }],
        series: [{}, ...lines.map((line) => ({ label: line.name, stroke: colour(line.colour), width: 1.5, points: { show: false } }))],
        legend: { show: false },
        cursor: { show: false },
      },
      data,
      this.node,
    );
  }
}
