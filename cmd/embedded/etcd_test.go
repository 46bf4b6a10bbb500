package embedded

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// runEtcd runs a member until the test ends, and waits until it is ready.
func runEtcd(t *testing.T, e *Etcd) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	member, ended := e.Runner(), make(chan error, 1)
	go func() { ended <- member.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	waited, done := context.WithTimeout(ctx, 20*time.Second)
	defer done()
	if err := member.Ready.Wait(waited); err != nil {
		t.Fatal(err)
	}
}

// A member without data does not start a new cluster if a running member belongs to another cluster.
func TestANewMemberMakesNoSecondCluster(t *testing.T) {
	ids := inner(t)
	peers := []string{freeAddress(t), freeAddress(t)}
	list := fmt.Sprintf("etcd-0=https://%s,etcd-1=https://%s", peers[0], peers[1])
	member := func(n int, cluster string) *Etcd {
		return &Etcd{
			Dir:            t.TempDir(),
			Listen:         "https://" + freeAddress(t),
			ID:             ids("etcd"),
			Name:           fmt.Sprintf("etcd-%d", n),
			Peer:           "https://" + peers[n],
			InitialCluster: cluster,
		}
	}
	runEtcd(t, member(0, "etcd-0=https://"+peers[0]))
	err := member(1, list).Runner().Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "etcd-0 is a member of another cluster") {
		t.Errorf("%v", err)
	}
}

// TestProbesPassWhileEtcdHasNoSpace checks the paths of the manifest's probes. A member that the kubelet kills because
// its quota is used up could not serve the deletions that free it.
func TestProbesPassWhileEtcdHasNoSpace(t *testing.T) {
	manifest, err := os.ReadFile("../../deploy/k8s/components/etcd/etcd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	probes := regexp.MustCompile(`httpGet: \{path: "?([^",]+)`).FindAllStringSubmatch(string(manifest), -1)
	if len(probes) != 3 {
		t.Fatalf("the manifest has the probes %q", probes)
	}
	ids := inner(t)
	e := &Etcd{
		Dir:     t.TempDir(),
		Listen:  "https://" + freeAddress(t),
		Metrics: "http://" + freeAddress(t),
		ID:      ids("etcd"),
	}
	runEtcd(t, e)
	conf, err := ids("registry").ClientConfig("etcd")
	if err != nil {
		t.Fatal(err)
	}
	registry, err := clientv3.New(clientv3.Config{Endpoints: []string{e.Listen}, TLS: conf, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer registry.Close()
	full := &etcdserverpb.AlarmRequest{
		Action: etcdserverpb.AlarmRequest_ACTIVATE,
		Alarm:  etcdserverpb.AlarmType_NOSPACE,
	}
	if _, err := etcdserverpb.NewMaintenanceClient(registry.ActiveConnection()).Alarm(t.Context(), full); err != nil {
		t.Fatal(err)
	}
	status := func(path string) int {
		resp, err := http.Get(e.Metrics + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if got := status("/health"); got != http.StatusServiceUnavailable {
		t.Errorf("/health: %d; the alarm has no effect", got)
	}
	for _, probe := range probes {
		if got := status(probe[1]); got != http.StatusOK {
			t.Errorf("%s: %d", probe[1], got)
		}
	}
}
