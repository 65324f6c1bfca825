// The engine's steps as they come, for every view that shows them.

import * as api from "./api.js";
import { app } from "./app.js";
import type { Branch, Drafted } from "./branches.js";
import { isPrefill } from "./export.js";
import type { Step } from "./types.js";

const MOST = 8192;

let log: Step[] = [];
let following: AbortController | null = null;
const listeners = new Set<() => void>();
export let isElsewhere = false; // the engine is in another process, which shows none of its steps

export const stepLog = (): readonly Step[] => log;

/** Called when steps have come. */
export function onSteps(listener: () => void): void {
  listeners.add(listener);
}

/** Follow the engine while the page is open. */
export function follow(): void {
  if (following) return;
  const abort = (following = new AbortController());
  void (async () => {
    try {
      for await (const news of api.steps(log.at(-1)?.number ?? -1, abort.signal)) {
        if (news.steps[0] && log.at(-1) && news.steps[0].number <= (log.at(-1)?.number ?? -1)) log = []; // a new server counts anew
        log.push(...news.steps);
        if (log.length > MOST) log.splice(0, log.length - MOST);
        for (const branch of app.tree.list()) if (mayChangeDrafts(branch, news.steps)) noteDrafts(branch);
        for (const listen of listeners) listen();
      }
    } catch (error) {
      if (error instanceof api.LostError) app.watch();
      else if (error instanceof api.ApiError && error.status === 501) {
        isElsewhere = true;
        return;
      }
    }
    if (following !== abort) return; // another model is followed now
    following = null;
    if (!abort.signal.aborted) setTimeout(() => { if (app.isUp) follow(); else setTimeout(follow, 3000); }, 1500);
  })();
}

/** Follow another engine: that of another model, or another replica. */
export function followAnew(): void {
  following?.abort();
  following = null;
  log = [];
  follow();
}

app.onTokens((branch) => { if (branch.state !== "running") noteDrafts(branch); });

/** Whether these steps tell something of a branch's drafts: they verified one, or follow a step that did. */
function mayChangeDrafts(branch: Branch, steps: readonly Step[]): boolean {
  const works = steps.flatMap((step) => step.works.filter((work) => work.request === branch.number));
  return works.some((work) => work.samples > 1) || (works.length > 0 && Boolean(branch.drafted?.size));
}

/** Keep on the branch what is known of its drafts: the log forgets old steps. */
function noteDrafts(branch: Branch): void {
  const first = log.flatMap((step) => step.works).find((work) => work.request === branch.number);
  if (!first) return;
  // What the log still has is decided anew: the last step of an answer may have come after its tokens.
  const forgotten = [...(branch.drafted ?? [])].filter(([index]) => index <= first.start - branch.prompt.length);
  branch.drafted = new Map([...forgotten, ...draftedOf(branch, log)]);
}

/** The tokens of an answer that a draft guessed, and those that stand where a draft was wrong, by their index. */
export function draftedOf(branch: Branch, steps: readonly Step[]): Map<number, Drafted> {
  const found = new Map<number, Drafted>();
  if (branch.number === null) return found;
  const works = steps.flatMap((step) => step.works.filter((work) => work.request === branch.number));
  works.forEach((work, place) => {
    const last = branch.state === "running" ? null : branch.prompt.length + branch.tokens.length - 1;
    const next = works[place + 1]?.start ?? last;
    if (work.samples < 2 || isPrefill(work) || next === null) return;
    const first = work.start + 1 - branch.prompt.length;
    const accepted = Math.max(0, next - work.start - 1);
    for (let offset = 0; offset < accepted; offset++) found.set(first + offset, { isAccepted: true, rejected: 0 });
    const rejected = work.samples - 1 - accepted;
    if (rejected > 0 && first + accepted < branch.tokens.length) found.set(first + accepted, { isAccepted: false, rejected });
  });
  return found;
}
