package e2e

import (
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"watershed.dev/test/harness"
)

var lag = flag.Duration("lag", 1500*time.Millisecond, "the delay of the log for TestControllersBehindCreateNoMorePods")

// delayedProxy forwards TCP connections. It holds the bytes of the server for the delay.
type delayedProxy struct {
	listener net.Listener
	delay    atomic.Int64
}

func newDelayedProxy(t *testing.T, to string) *delayedProxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	p := &delayedProxy{listener: l}
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			go func() {
				_, _ = io.Copy(out, in)
				out.Close()
			}()
			go p.copyDelayed(in, out)
		}
	}()
	return p
}

// copyDelayed forwards bytes after the delay. The buffer holds the chunks of the delay.
func (p *delayedProxy) copyDelayed(to, from net.Conn) {
	type chunk struct {
		data []byte
		at   time.Time
	}
	chunks := make(chan chunk, 1<<16)
	go func() {
		defer close(chunks)
		for {
			data := make([]byte, 32<<10)
			n, err := from.Read(data)
			if err != nil {
				return
			}
			chunks <- chunk{data[:n], time.Now().Add(time.Duration(p.delay.Load()))}
		}
	}()
	defer from.Close()
	defer to.Close()
	for c := range chunks {
		time.Sleep(time.Until(c.at))
		if _, err := to.Write(c.data); err != nil {
			return
		}
	}
}

// victims are 45 pods: 25 at first, 10 by the ReplicaSet's larger scale, and 10 by the Deployment's second template.
const (
	victims = `
apiVersion: apps/v1
kind: ReplicaSet
metadata: {name: scaled, namespace: default}
spec:
  replicas: 10
  selector: {matchLabels: {app: scaled}}
  template: {metadata: {labels: {app: scaled}}, spec: {containers: [{name: c, image: a}]}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: rolled, namespace: default}
spec:
  replicas: 10
  strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 100%}}
  selector: {matchLabels: {app: rolled}}
  template: {metadata: {labels: {app: rolled}}, spec: {containers: [{name: c, image: a}]}}
---
apiVersion: batch/v1
kind: Job
metadata: {name: once, namespace: default}
spec:
  parallelism: 5
  completions: 5
  template: {spec: {restartPolicy: Never, containers: [{name: c, image: a}]}}
`
	firstPods, allPods = 25, 45
)

// podsOf counts the pods of the namespace default by their UIDs, as a watch receives them.
type podsOf struct {
	events <-chan watch.Event
	seen   map[types.UID]bool
}

func watchPods(t *testing.T, c kubernetes.Interface) *podsOf {
	t.Helper()
	list, err := c.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := c.CoreV1().Pods("default").Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Stop)
	return &podsOf{w.ResultChan(), map[types.UID]bool{}}
}

// until counts pods until done, with at most harness.Soon between two events.
func (p *podsOf) until(t *testing.T, done func(last string) bool) {
	t.Helper()
	for {
		select {
		case e, ok := <-p.events:
			pod, isPod := e.Object.(*corev1.Pod)
			if !ok || !isPod {
				t.Fatalf("the watch has ended after %d pods: %+v", len(p.seen), e.Object)
			}
			p.seen[pod.UID] = true
			if done(pod.Name) {
				return
			}
		case <-time.After(harness.Soon):
			t.Fatalf("no event after %d pods", len(p.seen))
		}
	}
}

// runControllers lets kube-controller-manager create, scale and roll workloads on s. It kills the controllers while
// they create pods, and starts them again. It returns the number of the pods that they have created.
func runControllers(t *testing.T, s *harness.Server) int {
	began := time.Now()
	c := s.Client()
	pods := watchPods(t, c)
	manager := s.ControllerManager(t, harness.TempDir(t))
	harness.Eventually(t, harness.Soon, func() error { // of the pods' service account
		_, err := c.CoreV1().ServiceAccounts("default").Get(t.Context(), "default", metav1.GetOptions{})
		return err
	})
	s.Apply(victims)
	pods.until(t, func(string) bool { return len(pods.seen) == firstPods })
	t.Logf("%d pods after %s", firstPods, time.Since(began).Round(time.Second))
	s.Kubectl("scale", "replicaset", "scaled", "--replicas=20")
	s.Kubectl("set", "image", "deployment/rolled", "c=b")
	// The lists go to etcd, so the controllers are killed before their informers have the pods.
	harness.Eventually(t, harness.Soon, func() error {
		all, err := c.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{LabelSelector: "app=scaled"})
		if err == nil && len(all.Items) <= 10 {
			err = fmt.Errorf("%d pods", len(all.Items))
		}
		return err
	})
	manager.Kill()
	s.ControllerManager(t, harness.TempDir(t))
	harness.Eventually(t, harness.Soon, func() error { // the controllers have seen all their pods
		rs, err := c.AppsV1().ReplicaSets("default").Get(t.Context(), "scaled", metav1.GetOptions{})
		if err != nil || rs.Status.Replicas != 20 {
			return fmt.Errorf("%v, %+v", err, rs.Status)
		}
		d, err := c.AppsV1().Deployments("default").Get(t.Context(), "rolled", metav1.GetOptions{})
		if err != nil || d.Status.ObservedGeneration != d.Generation || d.Status.UpdatedReplicas != 10 ||
			d.Status.Replicas != 10 {
			return fmt.Errorf("%v, %+v", err, d.Status)
		}
		job, err := c.BatchV1().Jobs("default").Get(t.Context(), "once", metav1.GetOptions{})
		if err != nil || job.Status.Active != 5 {
			return fmt.Errorf("%v, %+v", err, job.Status)
		}
		return nil
	})
	last := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "last", Namespace: "default"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "a"}}},
	}
	if _, err := c.CoreV1().Pods("default").Create(t.Context(), last, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pods.until(t, func(name string) bool { return name == "last" })
	t.Logf("%d pods after %s", len(pods.seen)-1, time.Since(began).Round(time.Second))
	return len(pods.seen) - 1
}

// TestControllersBehindCreateNoMorePods runs kube-controller-manager on a tier that receives the log late. The
// controllers are killed while they create pods. They create as many pods as the workloads have, as on kube-apiserver.
func TestControllersBehindCreateNoMorePods(t *testing.T) {
	t.Run("kube-apiserver", func(t *testing.T) {
		t.Parallel()
		if n := runControllers(t, harness.Oracle(t)); n < allPods {
			t.Errorf("%d pods, want %d", n, allPods)
		}
	})
	t.Run("split", func(t *testing.T) {
		t.Parallel()
		s := harness.Split(t, "")
		var proxies []*delayedProxy
		for _, replica := range []string{"watchfanout-0", "watchfanout-1"} {
			conf, err := os.ReadFile(filepath.Join(s.Dir, "config", replica+".yaml"))
			if err != nil {
				t.Fatal(err)
			}
			address := regexp.MustCompile(`nats-url: tls://(\S+)`).FindSubmatch(conf)
			if address == nil {
				t.Fatalf("no address of NATS in %s", conf)
			}
			p := newDelayedProxy(t, string(address[1]))
			proxies = append(proxies, p)
			setProcess(t, s, replica, "nats-url", "tls://"+p.listener.Addr().String())
		}
		checkIsClean(t, "--data-dir", s.Dir)
		for _, p := range proxies {
			p.delay.Store(int64(*lag))
		}
		keepLogMoving(t, s)
		if n := runControllers(t, s); n != allPods {
			t.Errorf("%d pods, want %d", n, allPods)
		}
	})
}

// keepLogMoving writes an object ten times a second until the test ends. If a log is silent for 3 s, its reader reads
// the stream through registry, without the delay. keepLogMoving waits until a watch of the object is late.
func keepLogMoving(t *testing.T, s *harness.Server) {
	t.Helper()
	maps := s.Client().CoreV1().ConfigMaps("kube-system")
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "moving"}}
	_, err := maps.Create(t.Context(), object, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	go func() {
		for tick := time.Tick(100 * time.Millisecond); t.Context().Err() == nil; {
			object.Data = map[string]string{"written": time.Now().Format(time.RFC3339Nano)}
			_, _ = maps.Update(t.Context(), object, metav1.UpdateOptions{})
			<-tick
		}
	}()
	w, err := maps.Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=moving"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	for until := time.After(harness.Soon); ; {
		select {
		case e, ok := <-w.ResultChan():
			m, isMap := e.Object.(*corev1.ConfigMap)
			if !ok || !isMap {
				t.Fatalf("the watch has ended: %+v", e.Object)
			}
			written, err := time.Parse(time.RFC3339Nano, m.Data["written"])
			if age := time.Since(written); err == nil && age > *lag*3/4 && age < time.Minute {
				t.Logf("events are %s old", age.Round(100*time.Millisecond))
				return
			}
		case <-until:
			t.Fatal("no event was late")
		}
	}
}
