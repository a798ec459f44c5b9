"""The style sheet of the report page. Every colour is a variable with a light and a dark value; plots only name classes."""

STYLE = """
:root {
  --ground: #f7f7f5; --surface: #ffffff; --ink: #1d2126; --soft: #646b73; --line: #e3e4e1; --faint: #eeefec;
  --accent: #2563c9; --accent-soft: #b9cdf0; --second: #0f8f7e; --bad: #c2351f; --bad-ground: #fdeeea;
  --over: #c9820d; --over-soft: #f0d6a4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171a; --surface: #1c2024; --ink: #e7e9ea; --soft: #98a0a8; --line: #2e3439; --faint: #262b30;
    --accent: #6d9df0; --accent-soft: #33486d; --second: #3cc1ad; --bad: #f0715a; --bad-ground: #3a1f1a;
    --over: #e2a541; --over-soft: #63491b;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 Inter, ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased; }
main { max-width: 1160px; margin: 0 auto; padding: 48px 28px 72px; }
header { margin-bottom: 28px; }
.eyebrow { margin: 0; color: var(--accent); font-size: 12px; font-weight: 600; letter-spacing: .09em; text-transform: uppercase; }
h1 { margin: 4px 0 6px; font-size: 32px; line-height: 1.15; letter-spacing: -.02em; font-weight: 650; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 15px; font-weight: 620; letter-spacing: -.005em; }
.lead { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
.lead strong { color: var(--ink); font-weight: 600; }
.forced { margin: 0 0 20px; padding: 12px 16px; border: 1px solid var(--bad); border-radius: 10px;
  background: var(--bad-ground); color: var(--bad); font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 14px; margin-bottom: 14px; }
.card, figure, section.table, .facts > div { background: var(--surface); border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 16px 18px 14px; }
.card p { margin: 0; }
.card .name, .card .under { color: var(--soft); font-size: 13px; }
.card .value { font-size: 29px; line-height: 1.25; font-weight: 640; letter-spacing: -.025em; }
.card .value.long { font-size: 18px; line-height: 36px; letter-spacing: -.01em; }
.card .value small { font-size: 15px; font-weight: 500; color: var(--soft); letter-spacing: 0; }
.card.bad .value { color: var(--bad); }
.card.over .value { color: var(--over); }
.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
figure { margin: 0; padding: 18px 20px 14px; }
figure.wide { margin-top: 14px; }
figcaption { margin-bottom: 10px; }
figcaption p, section.table > p { margin: 1px 0 0; color: var(--soft); font-size: 13px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--soft); font-size: 11px; }
svg .note { fill: var(--ink); font-weight: 560; text-anchor: middle; }
svg .mid { text-anchor: middle; }
svg .end { text-anchor: end; }
svg .axis { font-size: 11px; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .lane { stroke: var(--faint); stroke-width: 1; }
svg .dot { fill: var(--accent); fill-opacity: .34; }
svg .dot.over { fill: var(--over); fill-opacity: .75; }
svg .dot:hover { fill-opacity: 1; }
svg .median { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .part0 { fill: var(--accent); }
svg .part1 { fill: var(--accent-soft); }
svg g:hover rect { opacity: .82; }
svg .wait { fill: var(--accent-soft); }
svg .stream { fill: var(--accent); }
svg .wait.over { fill: var(--over-soft); }
svg .stream.over { fill: var(--over); }
svg .failed { fill: var(--bad); }
svg rect.wait:hover, svg rect.stream:hover { fill: var(--second); }
.key { display: inline-block; width: 10px; height: 10px; margin: 0 6px 0 8px; border-radius: 2px; vertical-align: -1px; }
.key.part0, .key.stream { background: var(--accent); }
.key.part1, .key.wait { background: var(--accent-soft); }
.key.over { background: var(--over); }
.key.failed { background: var(--bad); }
.absent { display: grid; place-items: center; min-height: 200px; margin: 0; color: var(--soft); }
section.table { margin-top: 14px; padding: 18px 20px 12px; }
.scroll { overflow-x: auto; margin-top: 8px; }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; }
th, td { padding: 6px 10px; text-align: right; white-space: nowrap; border-top: 1px solid var(--faint); }
th { border-top: 0; color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
td:last-child { white-space: normal; }
details summary { cursor: pointer; list-style-position: outside; margin-left: 16px; }
details summary h2 { display: inline; }
details summary span { color: var(--soft); font-size: 13px; }
.facts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; margin-top: 14px; }
.facts > div { padding: 18px 20px; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 5px 20px; margin: 10px 0 0; font-size: 13.5px; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 860px) {
  main { padding: 28px 16px 48px; }
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .plots, .facts { grid-template-columns: minmax(0, 1fr); }
}
@media (max-width: 560px) {
  figure, section.table, .facts > div { padding: 14px 14px 10px; }
  .plot { overflow-x: auto; }
  .plot:has(svg)::before { content: "Scrolls sideways."; position: sticky; left: 0; color: var(--soft); font-size: 12px; }
  .plot svg { min-width: 480px; }
  .wide .plot svg { min-width: 1000px; }
  th:first-child, td:first-child { position: sticky; left: 0; min-width: 112px; max-width: 140px; background: var(--surface);
    white-space: normal; overflow-wrap: break-word; }
  dl { grid-template-columns: minmax(0, 1fr); gap: 0; }
  dd { margin-bottom: 8px; }
}
@media print { body { background: none; } .card, figure, section.table, .facts > div { break-inside: avoid; } }
"""
