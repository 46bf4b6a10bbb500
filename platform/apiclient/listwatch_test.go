package apiclient

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

func configMap(name, version string) corev1.ConfigMap {
	return corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: name, ResourceVersion: version}}
}

// In a round of lists, a watch that is behind sends the differences of its own list, and ends. A failed list is
// repeated.
func TestAWatchFollowsTheRoundsOfLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := &corev1.ConfigMapList{
			ListMeta: metav1.ListMeta{ResourceVersion: "5"},
			Items:    []corev1.ConfigMap{configMap("same", "1"), configMap("changed", "2"), configMap("deleted", "3")},
		}
		// The time of a list orders it after no step of the test, so mu does.
		var mu sync.Mutex
		lists, fail, inner := 0, false, watch.NewFake()
		c := &Cluster{listing: make(chan struct{}, 1)}
		l := &ListWatch{
			Lister: func(_ context.Context, o metav1.ListOptions) (runtime.Object, error) {
				mu.Lock()
				defer mu.Unlock()
				if lists++; fail || o.ResourceVersion != "" {
					return nil, errors.New("the list fails")
				}
				return now.DeepCopy(), nil
			},
			Watcher: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return inner, nil },
			Example: &corev1.ConfigMap{},
			Cluster: c,
		}
		if _, err := l.List(t.Context(), metav1.ListOptions{ResourceVersion: "0", Limit: 500}); err != nil {
			t.Fatal(err)
		}
		w, err := l.Watch(t.Context(), metav1.ListOptions{ResourceVersion: "5"})
		if err != nil {
			t.Fatal(err)
		}
		created := configMap("created", "6")
		inner.Add(&created)
		if e := <-w.ResultChan(); e.Type != watch.Added {
			t.Fatalf("the watch sends %v", e)
		}
		c.beginRound() // the list is not newer than the watch
		synctest.Wait()
		if lists != 2 {
			t.Errorf("%d lists", lists)
		}
		time.Sleep(stalledAfter)
		mu.Lock()
		fail = true
		mu.Unlock()
		c.beginRound()
		synctest.Wait()
		if lists != 3 {
			t.Errorf("%d lists", lists)
		}
		mu.Lock()
		fail = false
		now = &corev1.ConfigMapList{
			ListMeta: metav1.ListMeta{ResourceVersion: "9"},
			Items: []corev1.ConfigMap{configMap("same", "1"), configMap("changed", "7"), configMap("created", "6"),
				configMap("late", "8")},
		}
		mu.Unlock()
		time.Sleep(stalledAfter)
		var got []string
		for e := range w.ResultChan() {
			o := e.Object.(*corev1.ConfigMap)
			got = append(got, fmt.Sprint(e.Type, " ", o.Name, "@", o.ResourceVersion))
		}
		want := "[MODIFIED changed@7 ADDED late@8 DELETED deleted@9 BOOKMARK @9]"
		if fmt.Sprint(got) != want || lists != 4 {
			t.Errorf("%d lists, and the watch sends %v, not %s", lists, got, want)
		}
		// The next watch begins at the list.
		inner = watch.NewFake()
		if w, err = l.Watch(t.Context(), metav1.ListOptions{ResourceVersion: "9"}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.Stop()
		if _, ok := <-w.ResultChan(); ok || lists != 4 {
			t.Errorf("%d lists, and an event", lists)
		}
	})
}

// Rounds of lists are stalledAfter apart.
func TestRoundsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Cluster{}
		for range 10 {
			c.beginRound()
			time.Sleep(stalledAfter / 4)
		}
		if last, _ := c.rounds.Get(); last != 3 {
			t.Errorf("%d rounds", last)
		}
	})
}
