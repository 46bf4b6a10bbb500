package console

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"k8s.io/component-base/metrics/legacyregistry"
)

// counts are a resource's counters of the gateway's process.
type counts struct {
	Requests, ResponseBytes, Events, EventBytes float64
}

// counters are the counts of all resources at a time, and their rates since the read before.
type counters struct {
	at     time.Time
	period time.Duration // of the rates; 0: there was no read before
	totals map[string]counts
	rates  map[string]counts
}

// readCounters returns kube-apiserver's metrics of this process by resource.
func (c *Console) readCounters(ctx context.Context) (*counters, error) {
	return c.counters.get(ctx, func(_ context.Context, before *counters) (*counters, error) {
		families, err := legacyregistry.DefaultGatherer.Gather()
		if err != nil && len(families) == 0 {
			return nil, err
		}
		now := &counters{at: time.Now(), totals: map[string]counts{}, rates: map[string]counts{}}
		for _, f := range families {
			switch f.GetName() {
			case "apiserver_request_total", "apiserver_response_sizes", "apiserver_watch_events_total",
				"apiserver_watch_events_sizes":
			default:
				continue
			}
			for _, m := range f.GetMetric() {
				labels := map[string]string{}
				for _, l := range m.GetLabel() {
					labels[l.GetName()] = l.GetValue()
				}
				name := strings.TrimSuffix(labels["resource"]+"."+labels["group"], ".")
				n := now.totals[name]
				switch f.GetName() {
				case "apiserver_request_total":
					n.Requests += m.GetCounter().GetValue()
				case "apiserver_response_sizes":
					n.ResponseBytes += m.GetHistogram().GetSampleSum()
				case "apiserver_watch_events_total":
					n.Events += m.GetCounter().GetValue()
				default:
					n.EventBytes += m.GetHistogram().GetSampleSum()
				}
				now.totals[name] = n
			}
		}
		delete(now.totals, "") // requests without a resource
		if before != nil {
			now.period = now.at.Sub(before.at)
			for name, n := range now.totals {
				now.rates[name] = n.rate(before.totals[name], now.period.Seconds())
			}
		}
		return now, nil
	})
}

// rate returns the counts per second since before. DELETE /metrics resets counters.
func (n counts) rate(before counts, seconds float64) counts {
	per := func(now, before float64) float64 { return max(0, now-before) / seconds }
	return counts{per(n.Requests, before.Requests), per(n.ResponseBytes, before.ResponseBytes),
		per(n.Events, before.Events), per(n.EventBytes, before.EventBytes)}
}

// maxRows bounds the rows of a table.
const maxRows = 200

// resourceRow is a row of the table of resources.
type resourceRow struct {
	Name          string
	Watches       int
	Totals, Rates counts
}

// resourcesView returns the resources of this gateway, sorted by traffic.
func resourcesView(c *Console, req *http.Request, all *Cluster) (any, error) {
	now, err := c.readCounters(req.Context())
	if err != nil {
		return nil, err
	}
	rows := map[string]*resourceRow{}
	row := func(name string) *resourceRow {
		if rows[name] == nil {
			rows[name] = &resourceRow{Name: name}
		}
		return rows[name]
	}
	for name, n := range now.totals {
		row(name).Totals, row(name).Rates = n, now.rates[name]
	}
	for _, u := range all.Gateways[0].Watches {
		row(u.Resource).Watches += u.Watches
	}
	sorted := slices.SortedFunc(maps.Values(rows), func(a, b *resourceRow) int {
		return cmp.Or(cmp.Compare(b.Rates.EventBytes+b.Rates.ResponseBytes, a.Rates.EventBytes+a.Rates.ResponseBytes),
			cmp.Compare(b.Totals.Requests, a.Totals.Requests), strings.Compare(a.Name, b.Name))
	})
	shown := sorted[:min(len(sorted), maxRows)]
	columns := []string{"Requests", "Response size", "Events", "Event size"}
	return map[string]any{
		"Columns": append(columns, columns...),
		"Rows":    shown,
		"More":    len(sorted) - len(shown),
		"Period":  now.period,
	}, nil
}
