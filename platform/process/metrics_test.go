package process

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/rpc"
)

// Only a process with an xDS client reports that it has no xDS server. The alert XDSDisconnected relies on it.
func TestOnlyXDSClientsReportTheirConnection(t *testing.T) {
	for name, c := range map[string]struct {
		network network
		want    bool
	}{"without a client": {network{}, false}, "with a client": {network{xds: &rpc.XDS{}}, true}} {
		families, err := c.network.metrics().Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := false
		for _, f := range families {
			got = got || f.GetName() == "watershed_xds_connected"
		}
		if got != c.want {
			t.Errorf("%s: watershed_xds_connected %t, want %t", name, got, c.want)
		}
	}
}

// Services of a process may have the collectors of a shared package together. Another collector of the same name is a
// mistake.
func TestServicesShareCollectors(t *testing.T) {
	counter := func() prometheus.Collector {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "shared", Help: "Shared."})
	}
	m, shared := NewMetrics(), counter()
	m.Add([]prometheus.Collector{shared})
	m.Add([]prometheus.Collector{shared})
	defer func() {
		if recover() == nil {
			t.Error("two collectors have the same name")
		}
	}()
	m.Add([]prometheus.Collector{counter()})
}
