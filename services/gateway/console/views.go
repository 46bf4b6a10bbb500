package console

import (
	"cmp"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"watershed.dev/platform/process"
	"watershed.dev/services/gateway/routing"
	"watershed.dev/services/gateway/watch"
)

// services are the services of a Watershed, in the order of a request's path.
var services = []string{"gateway", "authn", "authz", "admission", "registry", "watchfanout"}

// registryState is the part of a registry's state that pages show (services/registry, State).
type registryState struct {
	Process string `json:"-"`
	Etcds   []struct {
		Error   string
		Alarms  []string
		Members []etcdMember
	}
	Logs []struct {
		Log, Error, Leader              string
		Publishing                      bool
		Revision                        int64
		Current, Wanted                 int
		Messages                        uint64
		Bytes, MaxBytes                 float64
		OldestSeconds, RetentionSeconds float64
	}
}

type etcdMember struct {
	Endpoint, Version, Error      string
	Leader                        bool
	Bytes, InUseBytes, QuotaBytes float64
	Alarms, Errors                []string
}

// replicaState is the part of a watchfanout replica's state that pages show (services/watchfanout, Status).
type replicaState struct {
	Process, Address, Error          string
	Ready                            bool
	Revision, Behind, Resets         int64
	Watches                          int
	LagMilliseconds, EventsPerSecond float64
	Bytes                            float64
	Slowest                          []struct {
		Resource          string
		Revision, Waiting int64
	}
}

// registries returns the states of the registries.
func (all *Cluster) registries() (states []*registryState) {
	for _, r := range all.Reports {
		if st := (&registryState{}); r.State("registry", st) {
			st.Process = r.Name()
			states = append(states, st)
		}
	}
	return states
}

// replicas returns the states of the replicas of the watch tier.
func (all *Cluster) replicas() (states []*replicaState) {
	for _, r := range all.Reports {
		st := &replicaState{}
		if r.State("watchfanout", st) || r.Error != "" && slices.Contains(r.Services, "watchfanout") {
			st.Process, st.Address, st.Error = r.Name(), r.Address, r.Error
			states = append(states, st)
		}
	}
	return states
}

// serviceCard has the number of processes of a service, and the number of ready processes.
type serviceCard struct {
	Name         string
	Ready, Total int
}

func topologyView(_ *Console, _ *http.Request, all *Cluster) (any, error) {
	processes := slices.Clone(all.Reports)
	slices.SortStableFunc(processes, func(a, b *process.Report) int { return slices.Compare(a.Services, b.Services) })
	var cards []serviceCard
	for _, name := range services {
		card := serviceCard{Name: name}
		for _, r := range processes {
			if !slices.Contains(r.Services, name) {
				continue
			}
			card.Total++
			if r.Error == "" && r.NotReady[name] == "" {
				card.Ready++
			}
		}
		cards = append(cards, card)
	}
	etcd, members := serviceCard{Name: "etcd"}, map[string]bool{}
	var stores []etcdMember
	for _, st := range all.registries() {
		for _, e := range st.Etcds {
			for _, m := range e.Members {
				if members[m.Endpoint] {
					continue
				}
				members[m.Endpoint] = true
				m.Alarms = e.Alarms
				stores = append(stores, m)
				etcd.Total++
				if m.Error == "" && e.Error == "" {
					etcd.Ready++
				}
			}
		}
	}
	nats := serviceCard{Name: "NATS"}
	for _, st := range all.registries() {
		for _, l := range st.Logs {
			nats.Total, nats.Ready = max(nats.Total, l.Wanted), max(nats.Ready, l.Current)
		}
	}
	shown := processes[:min(len(processes), maxRows)]
	return map[string]any{"Cards": append(cards, etcd, nats), "Processes": shown,
		"More": len(processes) - len(shown), "Stores": stores}, nil
}

func eventsView(_ *Console, _ *http.Request, all *Cluster) (any, error) {
	replicas := all.replicas()
	slow := slices.ContainsFunc(replicas, func(r *replicaState) bool { return len(r.Slowest) > 0 })
	return map[string]any{"Replicas": replicas, "Slow": slow, "Registries": all.registries()}, nil
}

// usageRow is a row of the map of watches.
type usageRow struct {
	Gateway string
	watch.Usage
}

// column is a column of the map of watches. Order is the value of the parameter sort; empty: no sort.
type column struct{ Title, Order, Sorted, Class, Link string }

var columns = []column{
	{Title: "User", Order: "user", Sorted: "ascending"},
	{Title: "Resource", Order: "resource", Sorted: "ascending"},
	{Title: "Watches", Order: "watches", Sorted: "descending", Class: "n"},
	{Title: "Behind", Order: "behind", Sorted: "descending", Class: "n"},
	{Title: "Own stream", Class: "n"},
	{Title: "Bytes/s", Order: "rate", Sorted: "descending", Class: "n"},
	{Title: "Gateway"},
	{Title: "Replica"},
}

// compareUsages compares by an order, and then by rate.
func compareUsages(order string, a, b *watch.Usage) int {
	first := 0
	switch order {
	case "behind":
		first = cmp.Compare(b.Behind, a.Behind)
	case "watches":
		first = cmp.Compare(b.Watches, a.Watches)
	case "user":
		first = strings.Compare(a.User, b.User)
	case "resource":
		first = strings.Compare(a.Resource, b.Resource)
	}
	return cmp.Or(first, cmp.Compare(b.BytesPerSecond, a.BytesPerSecond), cmp.Compare(b.Watches, a.Watches),
		strings.Compare(a.User, b.User), strings.Compare(a.Resource, b.Resource))
}

// watchesView returns the watches of all gateways. The parameter sort is an order, and q selects users and resources
// that contain the text.
func watchesView(_ *Console, req *http.Request, all *Cluster) (any, error) {
	query := req.URL.Query()
	order, text := "rate", watch.ShortName(query.Get("q"))
	shownColumns := slices.Clone(columns)
	for i := range shownColumns {
		if c := &shownColumns[i]; c.Order != "" {
			if c.Order == query.Get("sort") {
				order = c.Order
			}
			link := url.Values{"sort": {c.Order}}
			keep(link, query, "q", "refresh")
			c.Link = Root + "/watches?" + link.Encode()
		}
	}
	for i, c := range shownColumns {
		if c.Order != order {
			shownColumns[i].Sorted = ""
		}
	}
	var rows []usageRow
	open, unlisted, top := 0, 0, 1.0
	for _, g := range all.Gateways {
		open += g.Open
		unlisted += g.Usages - len(g.Watches)
		for _, u := range g.Watches {
			if strings.Contains(u.User, text) || strings.Contains(u.Resource, text) {
				rows = append(rows, usageRow{g.Name, u})
				top = max(top, u.BytesPerSecond)
			}
		}
	}
	slices.SortFunc(rows, func(a, b usageRow) int {
		return cmp.Or(compareUsages(order, &a.Usage, &b.Usage), strings.Compare(a.Gateway, b.Gateway))
	})
	shown := rows[:min(len(rows), maxRows)]
	return map[string]any{"Rows": shown, "More": len(rows) - len(shown), "Unlisted": unlisted, "Open": open,
		"Top": top, "Order": order, "Text": text, "Columns": shownColumns}, nil
}

// requestRow is a row of the slow requests.
type requestRow struct {
	Gateway string
	routing.SlowRequest
}

func requestsView(_ *Console, _ *http.Request, all *Cluster) (any, error) {
	var rows []requestRow
	for _, g := range all.Gateways {
		for _, r := range g.Slow {
			rows = append(rows, requestRow{g.Name, r})
		}
	}
	slices.SortFunc(rows, func(a, b requestRow) int { return b.Received.Compare(a.Received) })
	return map[string]any{"Rows": rows[:min(len(rows), maxRows)], "Threshold": routing.SlowThreshold}, nil
}
