// Package console serves the console: pages about a running Watershed for operators, at Root. It does not authorize
// requests. It changes nothing, and calls no service: the gateway passes the reports of processes.
//
// The pages show names of users and of resources. They show no object, no query and no credential. Clients choose the
// names of users, so the templates escape every text, and each page has a bounded number of rows.
package console

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/process"
	"watershed.dev/services/gateway/responsewriters"
	"watershed.dev/services/gateway/routing"
	"watershed.dev/services/gateway/watch"
)

// Root is the path of the first page. The other pages are below it.
const Root = "/watershed"

// maxAge is the time for which clients share a read of the cluster.
const maxAge = 2 * time.Second

// Gateway is the state of a gateway for the console. Other gateways receive it in heartbeats.
type Gateway struct {
	// Name is the name of the gateway's process.
	Name string `json:"-"`
	// Watches are the usages with the highest rates of all Usages, and Open is the number of open watches.
	Watches []watch.Usage `json:"watches,omitempty"`
	Usages  int           `json:"usages"`
	Open    int           `json:"open"`
	// Slow are the newest slow requests.
	Slow []routing.SlowRequest `json:"slow,omitempty"`
}

// NewGateway returns the state of a gateway with these usages.
func NewGateway(all []watch.Usage, slow []routing.SlowRequest) *Gateway {
	g := &Gateway{Watches: all, Usages: len(all), Slow: slow}
	for i := range all {
		g.Open += all[i].Watches
	}
	slices.SortFunc(all, func(a, b watch.Usage) int { return compareUsages("", &a, &b) })
	return g
}

// maxSlowBytes bounds the slow requests of an encoded state, in bytes.
const maxSlowBytes = 4 << 10

// Encode returns the state as JSON of at most limit bytes, with as many slow requests and usages as fit.
func (g Gateway) Encode(limit int) ([]byte, error) {
	g.Slow = fit(g.Slow, maxSlowBytes)
	all := g.Watches
	g.Watches = nil
	data, err := Marshal(g)
	if err != nil {
		return nil, err
	}
	g.Watches = fit(all, limit-len(data)-len(`,"watches":`))
	return Marshal(g)
}

// fit returns the first rows whose JSON fits into limit bytes.
func fit[T any](rows []T, limit int) []T {
	size := len("[]")
	for i := range rows {
		data, err := Marshal(rows[i])
		if size += len(data) + len(","); err != nil || size > limit {
			return rows[:i]
		}
	}
	return rows
}

// Marshal returns v as JSON. Unlike json.Marshal, it does not write <, > and & with 6 bytes each.
func Marshal(v any) ([]byte, error) {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSuffix(out.Bytes(), []byte("\n")), err
}

// Cluster is a running Watershed.
type Cluster struct {
	// Reports are the reports of the processes. The first is this gateway's.
	Reports []*process.Report
	// Gateways are the states of the gateways. The first is this gateway's.
	Gateways []*Gateway
}

// socketDirectory matches the directory in the address of a Unix socket, also in the error of a call.
var socketDirectory = regexp.MustCompile(`unix([: ])/([\w./+@=~-]*/)?`)

// withoutDirectories returns a copy whose reports name Unix sockets without their directories.
func (all *Cluster) withoutDirectories() (*Cluster, error) {
	data, err := Marshal(all.Reports)
	if err != nil {
		return nil, err
	}
	shown := &Cluster{Gateways: all.Gateways}
	return shown, json.Unmarshal(socketDirectory.ReplaceAll(data, []byte("unix$1")), &shown.Reports)
}

// Console serves the pages.
type Console struct {
	// Read returns the state of the cluster.
	Read func(context.Context) (*Cluster, error)

	cluster  cached[*Cluster]
	counters cached[*counters]
}

// cached shares a value among the callers of get for maxAge.
type cached[T any] struct {
	group coalesce.Group[T]
	value T
	read  time.Time
}

// get returns the cached value, or calls read with it.
func (c *cached[T]) get(ctx context.Context, read func(context.Context, T) (T, error)) (T, error) {
	return c.group.Get(ctx, "", func(ctx context.Context) (T, error) { // reads of a name run in sequence
		if time.Since(c.read) < maxAge {
			return c.value, nil
		}
		value, err := read(ctx, c.value)
		if err == nil {
			c.value, c.read = value, time.Now()
		}
		return value, err
	})
}

//go:embed pages
var files embed.FS

// page is a page of the console. view returns the data of its template.
type page struct {
	Path, Title string
	template    func() *template.Template
	view        func(c *Console, req *http.Request, all *Cluster) (any, error)
}

var pages = []*page{
	{Path: Root, Title: "Topology", template: parse("topology"), view: topologyView},
	{Path: Root + "/watches", Title: "Watches", template: parse("watches"), view: watchesView},
	{Path: Root + "/resources", Title: "Resources", template: parse("resources"), view: resourcesView},
	{Path: Root + "/events", Title: "Event path", template: parse("events"), view: eventsView},
	{Path: Root + "/requests", Title: "Slow requests", template: parse("requests"), view: requestsView},
}

// parse returns a function that parses the template of a page at its first call. Most processes serve no page.
func parse(name string) func() *template.Template {
	return sync.OnceValue(func() *template.Template {
		functions := template.FuncMap{"bytes": formatBytes, "join": strings.Join, "age": process.FormatAge,
			"p99": process.FormatP99, "since": time.Since, "seconds": func(s float64) string {
				return process.FormatAge(time.Duration(s * float64(time.Second)))
			}}
		return template.Must(template.New("layout.html").Funcs(functions).ParseFS(files, "pages/layout.html",
			"pages/"+name+".html"))
	})
}

// style is the style sheet of every page. The policy names its hash, so that a page needs no other request.
var style, policy = func() (template.CSS, string) {
	data, err := files.ReadFile("pages/style.css")
	if err != nil {
		panic(err)
	}
	hash := sha256.Sum256(data)
	return template.CSS(data), "default-src 'none'; style-src 'sha256-" + //nolint:gosec // the text is not a client's
		base64.StdEncoding.EncodeToString(hash[:]) + "'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
}()

// layout is the data of the template of all pages.
type layout struct {
	*page
	Pages   []*page
	Style   template.CSS
	Gateway string
	Now     time.Time
	// Refresh is the interval in seconds at which the browser requests the page again; 0: never. Refreshes has the
	// intervals that the page offers.
	Refresh   int
	Refreshes []int
	Data      any
	query     url.Values
}

// Link returns the URL of a page with the parameter refresh. The page of the request keeps its other parameters.
func (l *layout) Link(path string, refresh int) string {
	query := url.Values{}
	if path == l.Path {
		keep(query, l.query, "q", "sort")
	}
	if refresh > 0 {
		query.Set("refresh", strconv.Itoa(refresh))
	}
	return path + "?" + query.Encode()
}

// keep copies parameters that are set, shortened.
func keep(to, from url.Values, names ...string) {
	for _, name := range names {
		if v := from.Get(name); v != "" {
			to.Set(name, watch.ShortName(v))
		}
	}
}

// ServeHTTP implements http.Handler.
func (c *Console) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	path := strings.TrimSuffix(req.URL.Path, "/")
	var shown *page
	for _, p := range pages {
		if p.Path == path {
			shown = p
		}
	}
	switch {
	case shown == nil:
		responsewriters.NotFound(w, req)
		return
	case req.Method != http.MethodGet && req.Method != http.MethodHead:
		w.Header().Set("Allow", "GET, HEAD")
		responsewriters.Error(w, req, responsewriters.V1, responsewriters.MethodNotAllowed)
		return
	}
	var out bytes.Buffer
	if err := c.write(&out, shown, req); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Frame-Options", "DENY")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
	_, _ = w.Write(out.Bytes())
}

func (c *Console) write(out *bytes.Buffer, p *page, req *http.Request) error {
	all, err := c.cluster.get(req.Context(), func(ctx context.Context, _ *Cluster) (*Cluster, error) {
		all, err := c.Read(ctx)
		if err != nil {
			return nil, err
		}
		return all.withoutDirectories()
	})
	if err != nil {
		return err
	}
	data, err := p.view(c, req, all)
	if err != nil {
		return err
	}
	l := &layout{page: p, Pages: pages, Style: style, Gateway: all.Gateways[0].Name, Now: time.Now().UTC(),
		Refreshes: []int{0, 5, 30}, Data: data, query: req.URL.Query()}
	if n, err := strconv.Atoi(l.query.Get("refresh")); err == nil && n > 0 {
		l.Refresh = max(n, int(maxAge.Seconds()))
	}
	return p.template().Execute(out, l)
}

// formatBytes returns a size, a float64 or a uint64, in a unit of at most 1000.
func formatBytes(size any) string {
	n, ok := size.(float64)
	if !ok {
		n = float64(size.(uint64))
	}
	units := []string{"B", "kB", "MB", "GB"}
	for n >= 1000 && len(units) > 1 {
		n, units = n/1000, units[1:]
	}
	if units[0] == "B" {
		return fmt.Sprintf("%.0f B", n)
	}
	return fmt.Sprintf("%.1f %s", n, units[0])
}
