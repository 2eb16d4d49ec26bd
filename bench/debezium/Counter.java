import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.connect.data.Struct;
import org.apache.kafka.connect.source.SourceRecord;

/**
 * Drains slots through Debezium's embedded engine into a sink that only counts.
 *
 * Each line of standard input is an order: host, port, database, user, slot, publication, number of changes, with
 * tabs between. Each is answered by a line: nanoseconds from when the server took the connection that the slot is
 * streamed over, by the server's own word, to the first change, and to the last, then how many inserts, updates and
 * deletes came. Or "error" and why. One process takes many orders, so that its code is compiled and warm after the
 * first.
 */
public final class Counter {
    private static final long LONGEST_MINUTES = 30;

    private static final String AGE =
            "SELECT (extract(epoch FROM clock_timestamp() - a.backend_start) * 1000000000)::int8 "
                    + "FROM pg_replication_slots s JOIN pg_stat_activity a ON a.pid = s.active_pid "
                    + "WHERE s.slot_name = ?";

    private final String[] order;
    private final long expected;
    private final CountDownLatch asked = new CountDownLatch(1);
    private final CountDownLatch over = new CountDownLatch(1);
    private volatile long connected;
    private long first;
    private long last;
    private long inserts;
    private long updates;
    private long deletes;
    private String error;

    private Counter(String[] order) {
        this.order = order;
        this.expected = Long.parseLong(order[6]);
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        for (String line = orders.readLine(); line != null; line = orders.readLine()) {
            String[] order = line.split("\t");
            System.out.println(new Counter(order).drain());
            System.out.flush();
        }
        System.exit(0);
    }

    private String drain() throws Exception {
        ExecutorService thread = Executors.newSingleThreadExecutor();
        DebeziumEngine<RecordChangeEvent<SourceRecord>> engine = DebeziumEngine.create(
                        ChangeEventFormat.of(Connect.class))
                .using(properties())
                .using((success, message, cause) -> end(success ? null : message + ": " + cause))
                .notifying(this::take)
                .build();
        thread.execute(engine);
        boolean inTime = over.await(LONGEST_MINUTES, TimeUnit.MINUTES);
        engine.close();
        thread.shutdown();
        thread.awaitTermination(1, TimeUnit.MINUTES);
        if (error != null || !inTime || count() < expected) {
            String why = error != null ? error : count() + " of " + expected + " changes came";
            return "error\t" + why.replaceAll("\\s+", " ");
        }
        return (first - connected) + "\t" + (last - connected) + "\t" + inserts + "\t" + updates + "\t" + deletes;
    }

    private Properties properties() {
        Properties chosen = new Properties();
        chosen.setProperty("name", "bench");
        chosen.setProperty("connector.class", "io.debezium.connector.postgresql.PostgresConnector");
        chosen.setProperty("offset.storage", "org.apache.kafka.connect.storage.MemoryOffsetBackingStore");
        chosen.setProperty("topic.prefix", "bench");
        chosen.setProperty("database.hostname", order[0]);
        chosen.setProperty("database.port", order[1]);
        chosen.setProperty("database.dbname", order[2]);
        chosen.setProperty("database.user", order[3]);
        chosen.setProperty("database.password", "");
        chosen.setProperty("plugin.name", "pgoutput");
        chosen.setProperty("slot.name", order[4]);
        chosen.setProperty("publication.name", order[5]);
        chosen.setProperty("publication.autocreate.mode", "disabled");
        chosen.setProperty("snapshot.mode", "no_data");
        chosen.setProperty("slot.drop.on.stop", "false");
        // A delete is one record, as it is one change.
        chosen.setProperty("tombstones.on.delete", "false");
        return chosen;
    }

    private void take(
            List<RecordChangeEvent<SourceRecord>> events,
            DebeziumEngine.RecordCommitter<RecordChangeEvent<SourceRecord>> committer)
            throws InterruptedException {
        if (first == 0) {
            first = System.nanoTime();
            // On a thread of its own: it shall not take Debezium's time.
            new Thread(this::askSince).start();
        }
        for (RecordChangeEvent<SourceRecord> event : events) {
            count(event.record());
            committer.markProcessed(event);
        }
        committer.markBatchFinished();
        if (count() >= expected) {
            last = System.nanoTime();
            asked.await();
            over.countDown();
        }
    }

    /** When, by this process's clock, the server took the connection that the slot is streamed over. */
    private void askSince() {
        String url = "jdbc:postgresql://" + order[0] + ":" + order[1] + "/" + order[2];
        try (Connection connection = DriverManager.getConnection(url, order[3], "");
                PreparedStatement query = connection.prepareStatement(AGE)) {
            query.setString(1, order[4]);
            try (ResultSet row = query.executeQuery()) {
                row.next();
                connected = System.nanoTime() - row.getLong(1);
            }
        } catch (SQLException failed) {
            end("who streams the slot: " + failed.getMessage());
        } finally {
            asked.countDown();
        }
    }

    private void count(SourceRecord record) {
        if (!(record.value() instanceof Struct value) || value.schema().field("op") == null) {
            return;
        }
        switch (value.getString("op")) {
            case "c" -> inserts++;
            case "u" -> updates++;
            case "d" -> deletes++;
            default -> {}
        }
    }

    private long count() {
        return inserts + updates + deletes;
    }

    private void end(String why) {
        if (why != null) {
            error = why;
        }
        over.countDown();
    }
}
