package e2e

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/chromedp"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

// browser is a headless chromium. Its methods fail the test.
type browser struct {
	*testing.T

	ctx context.Context
	url string
}

// driveConsole displays each page of the console in chromium, dark and light. It compares the contrast of text and the
// accessibility tree with WCAG 2.2 AA, and uses the map of watches with keys only. With -screenshots it writes a
// picture of each page.
func driveConsole(t *testing.T, s *harness.Server) {
	if _, err := exec.LookPath("chromium"); err != nil {
		t.Skip("chromium is not installed")
	}
	if *screenshots != "" {
		s.Controllers()
		s.Kubectl("create", "deployment", "web", "--image=nginx", "--replicas=20")
		s.Kubectl("rollout", "status", "deployment", "web", "--timeout=60s")
	}
	b := newBrowser(t, kubectlProxy(t, s)+"/watershed")
	b.visit("/resources") // the second view has rates
	for _, page := range []string{"/requests", "/events", "", "/watches", "/resources"} {
		name := strings.TrimPrefix(cmp.Or(page, "/topology"), "/")
		t.Run(name, func(t *testing.T) {
			b := &browser{T: t, ctx: b.ctx, url: b.url}
			for _, scheme := range []string{"light", "dark"} {
				b.scheme(scheme)
				b.visit(page)
				b.hasContrast(scheme)
				b.screenshot(name + "-" + scheme)
			}
			b.isAccessible()
			b.isReachedByTab()
		})
	}
	t.Run("keys", func(t *testing.T) { (&browser{T: t, ctx: b.ctx, url: b.url}).filtersWithKeys() })
}

// kubectlProxy returns the URL of a kubectl proxy, which the test ends.
func kubectlProxy(t *testing.T, s *harness.Server) string {
	t.Helper()
	address := fmt.Sprintf("127.0.0.1:%d", porttest.FreePort(t))
	_, port, _ := net.SplitHostPort(address)
	harness.Start(t, s.Dir, "proxy", harness.Peer("kubectl"), "proxy", "--port", port, "--kubeconfig", s.Kubeconfig)
	harness.Eventually(t, harness.Soon, func() error {
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
		}
		return err
	})
	return "http://" + address
}

// newBrowser starts chromium. An error of a page, such as a violation of its Content-Security-Policy, fails the
// test.
func newBrowser(t *testing.T, url string) *browser {
	t.Helper()
	// Root has no sandbox.
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox,
		chromedp.WSURLReadTimeout(harness.Soon))
	ctx, cancel := context.WithTimeout(t.Context(), 2*harness.Soon)
	t.Cleanup(cancel)
	ctx, stop := chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(stop)
	ctx, done := chromedp.NewContext(ctx)
	t.Cleanup(done)
	b := &browser{T: t, ctx: ctx, url: url}
	var mu sync.Mutex
	var errors []string
	if err := chromedp.Listen(ctx, func(event any) {
		if e, ok := event.(*cdplog.EventEntryAdded); ok && e.Entry.Level == cdplog.EntryLevelError {
			mu.Lock()
			defer mu.Unlock()
			errors = append(errors, e.Entry.Text+" "+e.Entry.URL)
		}
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		for _, e := range errors {
			if !strings.Contains(e, "/favicon.ico") { // the gateway has none, as kube-apiserver
				t.Error(e)
			}
		}
	})
	b.do(chromedp.EmulateViewport(1280, 520))
	return b
}

func (b *browser) do(steps ...chromedp.Action[chromedp.Void]) {
	b.Helper()
	if err := chromedp.Do(b.ctx, steps...); err != nil {
		b.Fatal(err)
	}
}

func (b *browser) visit(page string) {
	b.Helper()
	r, err := chromedp.RunResponse(b.ctx, chromedp.Navigate(b.url+page))
	if err != nil || r.Status != http.StatusOK {
		b.Fatalf("%s: %v %+v", page, err, r)
	}
}

// scheme makes the browser prefer a colour scheme.
func (b *browser) scheme(scheme string) {
	b.Helper()
	b.do(chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := cdp.Call(ctx, t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
		})
		return err
	}))
}

func (b *browser) screenshot(name string) {
	b.Helper()
	if *screenshots == "" {
		return
	}
	png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(harness.Root(), *screenshots, name+".png"), png, 0o644); err != nil {
		b.Fatal(err)
	}
}

// evaluate returns the value of a JavaScript expression in the page.
func evaluate[T any](b *browser, expression string) T {
	b.Helper()
	v, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		b.Fatalf("%v\n%s", err, expression)
	}
	return v
}

// lowContrast lists the texts whose contrast with their background is below 4.5, as WCAG 2.2 computes it (1.4.3). A
// text's background is that of the nearest ancestor with an opaque colour.
const lowContrast = `(() => {
  const rgb = c => c.match(/[\d.]+/g).map(Number);
  const luminance = c => {
    const [r, g, b] = rgb(c).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = e => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if ((rgb(c)[3] ?? 1) == 1) return c;
    }
    return 'rgb(255, 255, 255)';
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const low = [];
  for (let n; n = texts.nextNode();) {
    if (!n.data.trim()) continue;
    const pair = [getComputedStyle(n.parentElement).color, background(n.parentElement)];
    const [least, most] = pair.map(luminance).sort((a, b) => a - b);
    const contrast = (most + 0.05) / (least + 0.05);
    if (contrast < 4.5) low.push(n.data.trim() + ': ' + pair.join(' on ') + ', ' + contrast.toFixed(1));
  }
  return low;
})()`

// hasContrast fails the test if a text is hard to read, or if the style sheet does not apply.
func (b *browser) hasContrast(scheme string) {
	b.Helper()
	for _, text := range evaluate[[]string](b, lowContrast) {
		b.Errorf("%s: low contrast of %s", scheme, text)
	}
	back := map[string]string{"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[scheme]
	if got := evaluate[string](b, "getComputedStyle(document.body).backgroundColor"); got != back {
		b.Errorf("%s: the background is %s, want %s", scheme, got, back)
	}
}

// namedRoles are roles whose elements must have a name.
var namedRoles = []string{
	"link", "button", "textbox", "table", "columnheader", "rowheader", "navigation", "region", "heading",
}

// isAccessible fails the test if a screen reader lacks a landmark, or the name of an element that a user operates.
func (b *browser) isAccessible() {
	b.Helper()
	tree, err := chromedp.Run(b.ctx, func(ctx context.Context, t *chromedp.Target) (
		accessibility.GetFullAXTreeResult, error) {
		return cdp.Call(ctx, t, accessibility.GetFullAXTree, accessibility.GetFullAXTreeParams{})
	})
	if err != nil {
		b.Fatal(err)
	}
	count := map[string]int{}
	for _, n := range tree.Nodes {
		if n.Ignored || n.Role == nil {
			continue
		}
		role, name := strings.Trim(string(n.Role.Value), `"`), ""
		if n.Name != nil {
			name = strings.Trim(string(n.Name.Value), `"`)
		}
		count[role]++
		if slices.Contains(namedRoles, role) && name == "" {
			b.Errorf("a %s has no name", role)
		}
	}
	for _, role := range []string{"main", "navigation", "banner", "contentinfo"} {
		if count[role] != 1 {
			b.Errorf("the page has %d elements of the role %s, want 1: %v", count[role], role, count)
		}
	}
	if headings := evaluate[int](b, "document.querySelectorAll('h1').length"); headings != 1 {
		b.Errorf("the page has %d headings of the first level", headings)
	}
	if lang := evaluate[string](b, "document.documentElement.lang"); lang != "en" {
		b.Errorf("the language is %q", lang)
	}
}

// focused describes the element that has the focus: its text, or the name of an input. It is empty at the start and
// the end of the page.
const focused = `(e => e == document.body ? '' : (e.name || e.innerText).trim().split('\n')[0])(document.activeElement)`

func (b *browser) tab() string {
	b.Helper()
	b.do(chromedp.KeyEvent("\t"))
	return evaluate[string](b, focused)
}

// isReachedByTab fails the test if the key Tab does not reach each element that a user operates. Each needs an outline
// while it has the focus.
func (b *browser) isReachedByTab() {
	b.Helper()
	const operated = `a[href], button, input:not([type=hidden]), [tabindex="0"]`
	want := evaluate[int](b, "document.querySelectorAll('"+operated+"').length")
	b.do(chromedp.Func(func(ctx context.Context, t *chromedp.Target) error {
		_, err := chromedp.Evaluate[any]("document.activeElement.blur(); window.scrollTo(0, 0); null")(ctx, t)
		return err
	}))
	for n := range want {
		if b.tab() == "" {
			b.Errorf("Tab reached %d elements of %d", n, want)
			return
		}
		if outline := evaluate[string](b, "getComputedStyle(document.activeElement).outlineStyle"); outline == "none" {
			b.Errorf("%q has the focus without an outline", evaluate[string](b, focused))
		}
	}
}

// filtersWithKeys goes from the topology to the map of watches, selects the watches of a user, and sorts them, with
// keys only.
func (b *browser) filtersWithKeys() {
	b.visit("")
	if got := b.tab(); got != "Skip to the content" {
		b.Errorf("the first element is %q", got)
	}
	b.do(chromedp.KeyEvent("\r"))
	if id := evaluate[string](b, "document.activeElement.id"); id != "main" {
		b.Errorf("the focus skipped to %q", id)
	}
	b.visit("")
	b.follow("Watches")
	if title := evaluate[string](b, "document.querySelector('h1').innerText"); title != "Watches" {
		b.Errorf("the page is %q", title)
	}
	b.tabTo("q")
	b.press("alice\r")
	users := evaluate[[]string](b, "Array.from(document.querySelectorAll('tbody th'), e => e.innerText)")
	if len(users) == 0 || slices.ContainsFunc(users, func(u string) bool { return !strings.Contains(u, "alice") }) {
		b.Errorf("the watches of alice are of %q", users)
	}
	b.follow("Resource")
	sorted := "Array.from(document.querySelectorAll('[aria-sort]'), e => e.innerText + ' ' + e.ariaSort)"
	if got := evaluate[[]string](b, sorted); !slices.Equal(got, []string{"Resource ascending"}) {
		b.Errorf("the watches are sorted by %q", got)
	}
	if q := evaluate[string](b, "document.querySelector('#q').value"); q != "alice" {
		b.Errorf("after sorting, the filter is %q", q)
	}
}

// tabTo presses Tab until an element has the focus.
func (b *browser) tabTo(element string) {
	b.Helper()
	var seen []string
	for range 50 {
		if seen = append(seen, b.tab()); seen[len(seen)-1] == element {
			return
		}
	}
	b.Fatalf("Tab does not reach %q: %q", element, seen)
}

// press types keys, the last of which loads a page.
func (b *browser) press(keys string) {
	b.Helper()
	if r, err := chromedp.RunResponse(b.ctx, chromedp.KeyEvent(keys)); err != nil || r.Status != http.StatusOK {
		b.Fatalf("%q: %v %+v", keys, err, r)
	}
}

// follow presses Tab until a link has the focus, and then Enter.
func (b *browser) follow(link string) {
	b.Helper()
	b.tabTo(link)
	b.press("\r")
}
